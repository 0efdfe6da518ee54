"""Window attention on the CPU as every library computes it: the table of docs/benchmarks.md.

    python -m tests.benchmarks.attention            measure (a quarter of an hour on two idle cores)
    python -m tests.benchmarks.attention --show     write the table of the newest results again

Runs `planner bench attention` into results/attention-DATE.jsonl, and writes the table between the
two marks in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from datetime import date
from pathlib import Path

from planner.benches.records import newest_environment, read_records
from planner.report.bench import bench_text
from planner.schema.bench import BenchRecord
from tests.benchmarks.dated import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- attention: begin -->", "<!-- attention: end -->"
# Compiled in one precision only: each compilation takes a quarter of a minute.
RUNS = (("--precision", "fp32"), ("--precision", "bf16", "--path", "eager,sdpa"))


def measure() -> Path:
    """`planner bench attention` at the guide's shape, into a file of its own."""
    path = RESULTS / f"attention-{date.today()}.jsonl"
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    code = "import sys; from planner.cli import main; sys.exit(main())"
    for asked in RUNS:
        arguments = ["bench", "attention", "--device", "cpu", "--output", str(fresh), *asked]
        subprocess.run(
            [sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, check=True
        )
    fresh.replace(path)
    return path


def latest() -> tuple[BenchRecord, ...]:
    """The newest results."""
    paths = sorted(RESULTS.glob("attention-????-??-??.jsonl"))
    return tuple(newest_environment(read_records(paths[-1])).records.values())


def table(records: tuple[BenchRecord, ...]) -> str:
    """The tables as Markdown, and what they stand for."""
    return bench_text(records, "github")


def write_page() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(latest())}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true")
    if not parser.parse_args().show:
        measure()
    write_page()


if __name__ == "__main__":
    main()
