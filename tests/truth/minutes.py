"""As many rows as some minutes on a GPU allow: `python -m tests.truth.minutes --record FILE`.

A probe starts, imports and builds for seconds and trains for one. Here several do the former at
once and take turns on the device (`tests/truth/turns.py`), so that it is never idle. Rows are of
`minutes.yaml`, those that compile in lanes of their own; a record is on disk as soon as it is
known, and what the file holds is not measured again. Workers see each other's contexts: the bytes
of the device are those of plain probes only (`tests.truth.record`).
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from planner.core.schema import FactoryModel
from search.loop.records import append_records, read_records
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import run_probe
from search.probe.protocol import ProbeRequest
from tests.truth.matrix import Row, read_matrix
from tests.truth.record import remaining_rows

DEVICE = "cuda:0"
TURNS = "PLANNER_TURNS"
MODULES = ("tests.truth.turns", "torch._dynamo")
# Of one row, with what it waits for its turn. The last rows may take so long over the budget.
DEADLINE_SECONDS, COMPILED_DEADLINE_SECONDS = 90.0, 240.0


class Lanes:
    """Rows by several probes at once until `deadline`, an instant of `time.monotonic`."""

    def __init__(self, file: Path, deadline: float, stack: ExitStack) -> None:
        self.file, self.deadline, self.stack = file, deadline, stack
        self.servers: dict[str, ForkServer] = {}
        self.lock = threading.Lock()

    def server(self, row: Row) -> ForkServer:
        name = "" if isinstance(row.model, FactoryModel) else row.model.library
        with self.lock:
            if name not in self.servers:
                self.servers[name] = self.stack.enter_context(ForkServer(row.model, MODULES))
            return self.servers[name]

    def measure(self, row: Row) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            return
        request = ProbeRequest(
            model=row.model, setting=row.setting, device=DEVICE, record_phases=True,
            warmup_seconds=0.3, min_measure_seconds=min(0.5, row.measure_seconds),
            max_measure_seconds=row.measure_seconds,
        )  # fmt: skip
        limit = COMPILED_DEADLINE_SECONDS if row.setting.compiles else DEADLINE_SECONDS
        seconds = min(limit, left + 10)
        record = run_probe(request, deadline_seconds=seconds, fork_server=self.server(row))
        with self.lock:
            append_records(self.file, [record], "--record")
        rate = f"{record.images_per_second:.0f}/s" if record.images_per_second else ""
        said = record.message.splitlines()[0][:100] if record.message else ""
        print(
            f"{self.deadline - time.monotonic():5.0f} {record.probe_seconds:5.1f} s"
            f" {record.status} {rate} {row.group}: {record.model.title} {said}",
            flush=True,
        )

    def run(self, rows: Sequence[Row], count: int) -> None:
        with ThreadPoolExecutor(max(1, count)) as pool:
            for found in [pool.submit(self.measure, row) for row in rows]:
                found.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--matrix", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds")
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--compiling", type=int, default=1, help="lanes of rows that compile")
    parser.add_argument("--groups", help="of the matrix, with commas; all by default")
    given = parser.parse_args()
    deadline = time.monotonic() + given.budget
    os.environ.setdefault(TURNS, str(given.record.with_suffix(".turn").absolute()))
    rows = read_matrix(given.matrix)
    if given.groups:
        rows = [row for row in rows if row.group in given.groups.split(",")]
    rows = remaining_rows(rows, read_records(given.record).records)
    print(f"{len(rows)} rows", flush=True)
    with ExitStack() as stack:
        lanes = Lanes(given.record, deadline, stack)
        for row in rows:  # all libraries are imported at once
            lanes.server(row)
        eager = [row for row in rows if not row.setting.compiles]
        compiled = [row for row in rows if row.setting.compiles]
        compiling = threading.Thread(target=lanes.run, args=(compiled, given.compiling))
        if compiled and given.compiling:
            compiling.start()
        if given.lanes:
            lanes.run(eager, given.lanes)
        if compiling.is_alive():
            compiling.join()


if __name__ == "__main__":
    main()
