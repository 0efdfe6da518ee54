"""Measures the rows of a matrix, one probe each; a record is on disk before the next begins."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PlannerError
from planner.schema import MeasurementRecord, SwinConfig
from search.probe.nursery import Nursery
from search.probe.protocol import ProbeRequest
from search.probe.runner import run_probe
from search.records import append_records, read_records
from search.validation.matrix import Row, row_key

DEADLINE_SECONDS = 90.0
COMPILED_DEADLINE_SECONDS = 420.0  # max-autotune of a whole Swin takes minutes


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
        self._by_library: dict[str, Nursery] = {}

    def __enter__(self) -> _Nurseries:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, row: Row) -> Nursery:
        library = row.model.library if isinstance(row.model, SwinConfig) else ""
        if library not in self._by_library:
            nursery = Nursery(row.model if library else None)
            self._by_library[library] = self._stack.enter_context(nursery)
        return self._by_library[library]


def remaining_rows(rows: Sequence[Row], records: Iterable[MeasurementRecord]) -> list[Row]:
    """Those of `rows` that `records` do not hold yet; each record stands for one repeat."""
    done = Counter(row_key(record.model, record.setting) for record in records)
    left = []
    for row in rows:
        key = row_key(row.model, row.setting)
        if done[key] > 0:
            done[key] -= 1
        else:
            left.append(row)
    return left


def measure(
    rows: Sequence[Row],
    device: str,
    file: Path,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    budget_seconds: float | None = None,
    phases: bool = True,
) -> list[MeasurementRecord]:
    """Probes `rows` on `device` in order, appending to `file`; stops before the budget is over.

    Rows that `file` holds already (for the same model and setting) are not measured again, so an
    interrupted run goes on where it was. Raises PlannerError where the file is damaged.
    """
    known = read_records(file)
    if known.fault:
        raise PlannerError(
            f"{known.fault}.", "The lines before it are whole: mend or cut the file, then go on."
        )
    left = remaining_rows(rows, known.records)
    with _Nurseries() as nurseries:
        return _measure_all(left, device, file, on_progress, budget_seconds, phases, nurseries)


def _measure_all(
    left: Sequence[Row],
    device: str,
    file: Path,
    on_progress: Callable[[Progress], None],
    budget_seconds: float | None,
    phases: bool,
    nurseries: _Nurseries,
) -> list[MeasurementRecord]:
    started = time.monotonic()
    measured = []
    for number, row in enumerate(left, start=1):
        deadline = COMPILED_DEADLINE_SECONDS if row.setting.compile != "off" else DEADLINE_SECONDS
        if budget_seconds is not None:
            rest = budget_seconds - (time.monotonic() - started)
            if rest <= 0:
                break
            deadline = min(deadline, rest)
        began = time.monotonic()
        request = ProbeRequest(
            model=row.model,
            setting=row.setting,
            device=device,
            max_measure_seconds=row.measure_seconds,
            record_phases=phases,
        )
        record = run_probe(request, deadline_seconds=deadline, nursery=nurseries.of(row))
        append_records(file, [record])
        measured.append(record)
        on_progress(Progress(number, len(left), row, record, time.monotonic() - began))
    return measured
