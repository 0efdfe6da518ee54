"""Measures the rows of a matrix, one probe each; a record is on disk before the next begins."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from planner.core.errors import PlannerError
from planner.core.schema import MeasurementRecord, SwinConfig
from planner.core.schema.record import BUDGET_ENDED
from search.loop.study.records import append_records, read_records
from search.probe.device import describe_device
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import ProbeEvent, run_probe
from search.probe.protocol import ProbeRequest
from search.tuning.validation.matrix import Row, row_key

DEADLINE_SECONDS = 90.0
COMPILED_DEADLINE_SECONDS = 420.0
# From a cold cache on few cores max-autotune benchmarks each matmul and convolution of a whole Swin
# (inferred: no device has been measured by us yet).
AUTOTUNED_DEADLINE_SECONDS = 900.0
# A library's first row waits for its process to import torch and the library: a minute and more
# from a network disk.
IMPORT_SECONDS = 120.0
# No row is begun with less than this left: it would be cut short and have to be measured again.
LEAST_SECONDS = 30.0
LEAST_COMPILED_SECONDS = 120.0
# What times out or crashes is tried once more by the next run, and no more.
TRIES = 2


@dataclass(frozen=True)
class Begun:
    """The `number`-th of `total` rows has begun; it is given up on after `deadline_seconds`."""

    number: int
    total: int
    row: Row
    deadline_seconds: float


# Told when something begins, and where its worker is.
OnRun = Callable[[Begun | ProbeEvent], None]


@dataclass(frozen=True)
class Progress:
    """A row has been measured: the `number`-th of `total`, in `seconds`."""

    number: int
    total: int
    row: Row
    record: MeasurementRecord
    seconds: float


class _Nurseries:
    """One process a library that has imported it, from which its rows' workers are forked."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._by_library: dict[str, ForkServer] = {}

    def __enter__(self) -> _Nurseries:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def has(self, row: Row) -> bool:
        """Whether the library of `row` was imported for an earlier one."""
        return _library_of(row) in self._by_library

    def of(self, row: Row) -> ForkServer:
        library = _library_of(row)
        if library not in self._by_library:
            fork_server = ForkServer(row.model if library else None)
            self._by_library[library] = self._stack.enter_context(fork_server)
        return self._by_library[library]


def _library_of(row: Row) -> str:
    return row.model.library if isinstance(row.model, SwinConfig) else ""


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


def row_deadline(row: Row, first_of_library: bool) -> float:
    """Seconds that a row may take where no budget is shorter."""
    seconds = DEADLINE_SECONDS
    if row.setting.compile.startswith("max-autotune"):
        seconds = AUTOTUNED_DEADLINE_SECONDS
    elif row.setting.compile != "off":
        seconds = COMPILED_DEADLINE_SECONDS
    return seconds + row.measure_seconds + (IMPORT_SECONDS if first_of_library else 0.0)


def least_seconds(row: Row) -> float:
    """Seconds that must be left for a row to be begun."""
    return LEAST_SECONDS if row.setting.compile == "off" else LEAST_COMPILED_SECONDS


def measure(
    rows: Sequence[Row],
    device: str,
    file: Path,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    budget_seconds: float | None = None,
    on_run: OnRun = lambda news: None,
) -> list[MeasurementRecord]:
    """Probes `rows` on `device` in order, appending to `file`; stops before the budget is over.

    Rows that `file` settles already (for the same model and setting) are not measured again, so an
    interrupted run goes on where it was; rows that the rest of the budget is too short for are
    passed over. Raises PlannerError where the file is damaged or cannot be written.
    """
    known = read_records(file)
    if known.fault:
        raise PlannerError(
            f"{known.fault}.", "The lines before it are whole: mend or cut the file, then go on."
        )
    left = remaining_rows(rows, known.records, describe_device(device).title)
    started = time.monotonic()
    measured = []
    with _Nurseries() as fork_servers:
        for number, row in enumerate(left, start=1):
            deadline = row_deadline(row, first_of_library=not fork_servers.has(row))
            rest = math.inf
            if budget_seconds is not None:
                rest = budget_seconds - (time.monotonic() - started)
                if rest < least_seconds(row):
                    continue
            began = time.monotonic()
            on_run(Begun(number, len(left), row, min(deadline, rest)))
            request = ProbeRequest(
                model=row.model,
                setting=row.setting,
                device=device,
                max_measure_seconds=row.measure_seconds,
                record_phases=True,
            )
            record = run_probe(
                request, deadline_seconds=min(deadline, rest), fork_server=fork_servers.of(row),
                on_event=on_run,
            )  # fmt: skip
            if record.status == "timed_out" and rest < deadline:
                record = record.model_copy(update={"flags": (*record.flags, BUDGET_ENDED)})
            append_records(file, [record], "--record")
            measured.append(record)
            on_progress(Progress(number, len(left), row, record, time.monotonic() - began))
    return measured
