"""Measures the rows of a matrix on this device, one probe each, and holds them to the estimate.

    python -m tests.truth.record tests/truth/memory.yaml --record memory.jsonl --budget 20m
    python -m tests.truth.record tests/truth/minutes.yaml --record rows.jsonl --budget 8m

A record is on disk as soon as it is known; the same command goes on where it stopped.
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tabulate import tabulate

from planner.cli.rows import read_duration
from planner.core.errors import PlannerError
from planner.core.schema import FactoryModel, MeasurementRecord
from planner.core.schema.record import BUDGET_ENDED
from planner.report.text import describe_setting
from search.loop.records import append_records, read_records
from search.probe.device import choose_device, describe_device
from search.probe.parent import STEP_MODULES, ProbeServer, run_probe
from search.probe.protocol import ProbeRequest
from tests.truth.compare import QUANTITIES, accuracy, compare
from tests.truth.matrix import Row, read_matrix, row_key

DEADLINE_SECONDS = 90.0
COMPILED_DEADLINE_SECONDS = 420.0
# From a cold cache on few cores max-autotune benchmarks each matmul and convolution of a whole Swin
# (inferred: no device has been measured by us yet).
AUTOTUNED_DEADLINE_SECONDS = 900.0
# A library's first row waits for its process to import torch and the library: a minute and more
# from a network disk.
IMPORT_SECONDS = 120.0
# No row is begun with less than this left: it would be cut short and have to be measured again.
LEAST_ROW_SECONDS = 30.0
LEAST_COMPILED_SECONDS = 120.0
# What times out or crashes is tried once more by the next run, and no more.
TRIES = 2


def remaining_rows(
    rows: Sequence[Row], records: Iterable[MeasurementRecord], device_name: str | None = None
) -> list[Row]:
    """Those of `rows` that `records` do not settle yet, on the device called so where it is given.

    A record that says something of its setting settles one repeat. One that does not (cut short by
    the budget, out of memory because of other processes) settles none. A crash or a timeout may be
    either: each setting has `TRIES` of them before one settles a repeat.
    """
    settled: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for record in records:
        if device_name is not None and record.device.title != device_name:
            continue
        key = row_key(record.model, record.setting)
        if is_settled(record):
            settled[key] += 1
        elif not is_disturbed(record):
            failures[key] += 1
            settled[key] += failures[key] % TRIES == 0
    left = []
    for row in rows:
        key = row_key(row.model, row.setting)
        if settled[key] > 0:
            settled[key] -= 1
        else:
            left.append(row)
    return left


def is_settled(record: MeasurementRecord) -> bool:
    """Whether measuring the same setting again would say the same."""
    if record.status == "out_of_memory":
        return not is_disturbed(record)
    return record.status in ("measured", "unsupported", "non_finite")


def is_disturbed(record: MeasurementRecord) -> bool:
    """Whether a failure may be another's: the budget ended it, or others held or took some of the
    device, all of which a row of a matrix may have."""
    whole = record.device.memory_cap_bytes or record.device.total_bytes
    return record.judged_in(whole).inconclusive


def row_deadline(row: Row) -> float:
    """Seconds that a row may take where no budget is shorter."""
    seconds = DEADLINE_SECONDS
    if row.setting.compile.startswith("max-autotune"):
        seconds = AUTOTUNED_DEADLINE_SECONDS
    elif row.setting.compile != "off":
        seconds = COMPILED_DEADLINE_SECONDS
    return seconds + row.measure_seconds


def measure(
    rows: Sequence[Row], device: str, file: Path, budget_seconds: float = math.inf, **how: Any
) -> None:
    """Probes `rows` on `device` in order, each as the fields of a request in `how` say, appending
    to `file`; stops before the budget is over. One process a library has imported it, from which
    its rows' workers are forked.

    Rows that `file` settles already (for the same model and setting) are not measured again; rows
    that the rest of the budget is too short for are passed over. Raises PlannerError where the file
    is damaged or cannot be written.
    """
    known = read_records(file)
    if known.fault:
        raise PlannerError(
            f"{known.fault}.", "The lines before it are whole: mend or cut the file, then go on."
        )
    left = remaining_rows(rows, known.records, describe_device(device).title)
    print(f"{len(left)} rows", flush=True)
    ends_at, servers = time.monotonic() + budget_seconds, dict[str, ProbeServer]()
    with ExitStack() as stack:
        for row in left:
            rest = ends_at - time.monotonic()
            if rest < (LEAST_COMPILED_SECONDS if row.setting.compiles else LEAST_ROW_SECONDS):
                continue
            deadline = row_deadline(row)
            library = "" if isinstance(row.model, FactoryModel) else row.model.library
            if library not in servers:
                server = ProbeServer(row.model if library else None, STEP_MODULES)
                servers[library] = stack.enter_context(server)
                deadline += IMPORT_SECONDS
            request = ProbeRequest(
                model=row.model, setting=row.setting, device=device,
                max_measure_seconds=row.measure_seconds, **how,
            )  # fmt: skip
            record = run_probe(
                request, deadline_seconds=min(deadline, rest), fork_server=servers[library]
            )
            if record.status == "timed_out" and rest < deadline:
                record = record.model_copy(update={"flags": (*record.flags, BUDGET_ENDED)})
            append_records(file, [record], "--record")
            setting = describe_setting(row.setting, row.model)
            said = record.message.splitlines()[0][:100] if record.message else ""
            print(f"{record.probe_seconds:5.1f} s {row.model.title}, {setting}: {record.status} "
                  f"{said}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("matrix", type=Path)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget", default="24h")
    given = parser.parse_args()
    device, budget = choose_device(given.device), read_duration("--budget", given.budget)
    measure(read_matrix(given.matrix), device, given.record, budget)
    compared = compare(read_records(given.record).records)
    rows = [
        (quantity, of.count, f"{of.median:.2%}", f"{of.worst:.2%}")
        for quantity in QUANTITIES
        if (of := accuracy(compared, quantity)) is not None
    ]
    print(tabulate(rows, ("", "rows", "median error", "worst error")))


if __name__ == "__main__":
    main()
