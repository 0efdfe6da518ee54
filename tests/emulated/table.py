"""Which of `programs.py` run on a card of each capability, by torch's release.

`python -m tests.emulated.table [CARD…]` runs them with the installed torch, minutes a card, and
keeps what failed in table.json; truth/TABLES.md shows it, held by test_programs.py.
"""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from planner.machine.emulated import EmulatedMachine, emulated_gpu, started

ROOT = Path(__file__).parents[2]
RECORD_CONFIG = Path(__file__).with_name("table.json")
CARDS = ("t4", "a100-sxm-80gb", "rtx-3090", "rtx-4090", "h100-sxm-80gb", "b200", "rtx-5090")


def run_on(card: str, *names: str) -> tuple[dict[str, Any], str]:
    """A row of each program (all, unless some are named), and what was said on standard error."""
    with started(EmulatedMachine((emulated_gpu(card),))) as environment:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.emulated.programs", *names],
            env={**environment, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}, done.stderr


def as_text(kept: dict[str, Any]) -> str:
    """A line of each torch, and why some did not run."""
    capabilities = ["{}.{}".format(*emulated_gpu(card).capability) for card in CARDS]
    lines = [f"| torch | {' | '.join(capabilities)} |", "|---" * (1 + len(CARDS)) + "|"]
    why: dict[str, set[str]] = {}
    for torch, rows in sorted(kept.items(), key=lambda row: list(map(int, row[0].split(".")))):
        ran = [
            f"{r['programs'] - len(r['failed'])} of {r['programs']}" if r else ""
            for r in map(rows.get, capabilities)
        ]
        lines.append(f"| {torch} | {' | '.join(ran)} |")
        for capability, row in rows.items():
            for name, said in row["failed"].items():
                why.setdefault(f"`{name}`: {said}", set()).add(capability)
    on = {said: ", ".join(sorted(found, key=float)) for said, found in why.items()}
    return "\n".join([*lines, "", *(f"- {said} ({on[said]})" for said in sorted(on))])


def main(cards: list[str]) -> None:
    for card in cards or CARDS:
        found, _ = run_on(card)
        kept = json.loads(RECORD_CONFIG.read_text()) if RECORD_CONFIG.exists() else {}
        rows = kept.setdefault(version("torch").partition("+")[0], {})
        failed = {name: row["failed"] for name, row in found.items() if "failed" in row}
        capability = "{}.{}".format(*emulated_gpu(card).capability)
        rows[capability] = {"programs": len(found), "failed": failed}
        RECORD_CONFIG.write_text(json.dumps(kept, indent=1) + "\n")
        print(card, len(found), failed, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
