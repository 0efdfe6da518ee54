"""Where the device's time goes in a step, kernel by kernel, for each row of a matrix: one JSON line
each, `python -m tests.truth.profiles --record FILE`.

`seconds` are of one step, by phase and kind as `planner profile` tells them apart; `kernels` those
that take most of it. Workers start beside each other and take turns on the device.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from planner.core.schema import MeasurementRecord
from search.probe.parent.runner import run_probe
from search.probe.protocol import TRACE_FILE, ProbeRequest, ProfileOrder
from search.tuning.profiling.attribution import attribute
from search.tuning.profiling.trace import read_trace
from search.tuning.validation.matrix import Row, read_matrix
from tests.truth.minutes import DEADLINE_SECONDS, DEVICE, TURNS, Lanes

STEPS = 2
# Kernels are told until they make this share of the seconds.
TOLD_SHARE = 0.99


def profiled(row: Row, lanes: Lanes) -> dict[str, Any]:
    """A probe of `row` and the seconds of its step; without these where it does not run."""
    with tempfile.TemporaryDirectory() as folder:
        request = ProbeRequest(
            model=row.model, setting=row.setting, device=DEVICE, warmup_seconds=0.3,
            min_measure_seconds=0.3, max_measure_seconds=row.measure_seconds,
            profile=ProfileOrder(folder=folder, steps=STEPS),
        )  # fmt: skip
        seconds = min(DEADLINE_SECONDS, lanes.deadline - time.monotonic() + 10)
        record = run_probe(request, deadline_seconds=seconds, fork_server=lanes.server(row))
        found: dict[str, Any] = {"probe": record.model_dump(mode="json")}
        if record.status == "measured":
            found |= told(Path(folder) / TRACE_FILE)
    return found


def told(trace: Path) -> dict[str, Any]:
    found = attribute(read_trace(trace))
    steps, total = found.num_steps, sum(seconds for seconds, _ in found.names.values())
    ranked = sorted(found.names.items(), key=lambda item: -item[1][0])
    kernels, so_far = [], 0.0
    for (name, kind), (seconds, calls) in ranked:
        if so_far > TOLD_SHARE * total:
            break
        so_far += seconds
        kernels.append([name[:160], kind, seconds / steps, calls / steps])
    parts = [[*key, seconds / steps] for key, seconds in found.seconds.items()]
    return {"step_seconds": found.wall_seconds / steps, "seconds": parts, "kernels": kernels}


def is_told(line: str, row: Row) -> bool:
    record = MeasurementRecord.model_validate(json.loads(line)["probe"])
    is_same = record.model == row.model and record.setting == row.setting
    return is_same and record.status != "timed_out"


def run(rows: Sequence[Row], lanes: Lanes, count: int) -> None:
    lock = threading.Lock()

    def one(row: Row) -> None:
        if time.monotonic() > lanes.deadline:
            return
        found = profiled(row, lanes)
        with lock, lanes.file.open("a") as file:
            print(json.dumps(found), file=file, flush=True)
        left = lanes.deadline - time.monotonic()
        print(f"{left:5.0f} {found['probe']['status']} {row.model.title}", flush=True)

    with ThreadPoolExecutor(count) as pool:
        for ended in [pool.submit(one, row) for row in rows]:
            ended.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--matrix", type=Path, default=Path(__file__).parent / "h100" / "profiles.yaml"
    )
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=180.0, help="seconds")
    parser.add_argument("--lanes", type=int, default=3)
    given = parser.parse_args()
    os.environ.setdefault(TURNS, str(given.record.with_suffix(".turn").absolute()))
    known = given.record.read_text().splitlines() if given.record.exists() else []
    rows = [r for r in read_matrix(given.matrix) if not any(is_told(line, r) for line in known)]
    with ExitStack() as stack:
        lanes = Lanes(given.record, time.monotonic() + given.budget, stack)
        for row in rows:  # all libraries are imported at once
            lanes.server(row)
        run(rows, lanes, given.lanes)


if __name__ == "__main__":
    main()
