"""A matrix carried out: what is to be seen, then the rows, then the allocator's history of those
rows that were predicted badly. Every record is on disk before the next thing begins."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PlannerError
from planner.libraries.resolve import resolve_model
from planner.schema import MeasurementRecord, SwinConfig
from planner.schema.observation import Observation, ObservationRecord
from search.probe.device import describe_device
from search.study.records import append_records, read_records
from search.validation.compare import compare
from search.validation.matrix import Matrix, row_key
from search.validation.observe import observe, remaining_observations
from search.validation.run import Begun, OnRun, Progress, measure, read_whole

# No observation is begun with less than this left, if it asks for more.
LEAST_SECONDS = 30.0
# A prediction that is further off than this needs an explanation.
EXPLAINED_SHARE = 0.03
MAX_SNAPSHOTS = 6
SNAPSHOT_DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class Seen:
    """The `number`-th of `total` observations has been made."""

    number: int
    total: int
    record: ObservationRecord


def carry_out(
    matrix: Matrix,
    device: str,
    file: Path,
    on_seen: Callable[[Seen], None] = lambda seen: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    budget_seconds: float | None = None,
    rehearsal: bool = False,
    on_run: OnRun = lambda news: None,
) -> None:
    """Make the records that `file` lacks, in order, until the budget is over.

    A failure is a record and never keeps the next from being made. Raises PlannerError where the
    file is damaged or cannot be written, UsageError where there is no such device.
    """
    known = read_whole(file)
    end = math.inf if budget_seconds is None else time.monotonic() + budget_seconds
    name = describe_device(device).name
    left = remaining_observations(matrix.observations, known.observations, name)
    _look_at(left, device, file, on_seen, end, rehearsal, on_run)
    rest = None if budget_seconds is None else max(0.0, end - time.monotonic())
    measure(matrix.rows, device, file, on_progress, rest, on_run=on_run)
    if matrix.observations and not rehearsal:
        found = read_records(file)
        wanted = list(unexplained(found.records, snapshot_folder(file)))
        left = remaining_observations(wanted, found.observations, name)
        _look_at(left, device, file, on_seen, end, rehearsal, on_run)


def _look_at(
    left: list[Observation],
    device: str,
    file: Path,
    on_seen: Callable[[Seen], None],
    end: float,
    rehearsal: bool,
    on_run: OnRun,
) -> None:
    for number, observation in enumerate(left, start=1):
        rest = end - time.monotonic()
        chosen = observation
        if rest < observation.deadline and observation.when_short:
            chosen = observation.shortened()
        if rest < min(chosen.deadline, LEAST_SECONDS):
            continue
        on_run(Begun(number, len(left), chosen, min(chosen.deadline, rest)))
        record = observe(
            chosen, device, min(chosen.deadline, rest), snapshot_folder(file), rehearsal
        )
        if record.status == "timed_out" and rest < chosen.deadline:
            record = record.model_copy(update={"cut_short": True})
        append_records(file, [record], "--record")
        on_seen(Seen(number, len(left), record))


def snapshot_folder(file: Path) -> Path:
    """Where the snapshots of a file of records are kept."""
    return file.with_name(f"{file.stem}-snapshots")


def unexplained(records: Iterable[MeasurementRecord], folder: Path) -> Iterable[Observation]:
    """A snapshot for each eager row whose allocated or reserved bytes were predicted badly, the
    worst first."""
    errors: dict[str, tuple[float, MeasurementRecord]] = {}
    for c in compare(r for r in records if r.setting.compile == "off"):
        found = [abs(e) for q in ("allocated", "reserved") if (e := c.error(q)) is not None]
        if found and max(found) > EXPLAINED_SHARE:
            key = row_key(c.record.model, c.record.setting)
            errors[key] = max(errors.get(key, (0.0, c.record)), (max(found), c.record), key=_error)
    for key, (error, record) in sorted(errors.items(), key=lambda e: -e[1][0])[:MAX_SNAPSHOTS]:
        assert isinstance(record.model, SwinConfig)
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        yield Observation(
            name=f"snapshot-{digest}",
            see="snapshot",
            what=f"The allocator's history of a step that was predicted {error:.1%} off",
            model=_named(record.model, folder / f"model-{digest}.json"),
            setting=record.setting.model_dump(mode="json"),
            deadline=SNAPSHOT_DEADLINE_SECONDS,
        )


def _error(entry: tuple[float, MeasurementRecord]) -> float:
    return entry[0]


def _named(model: SwinConfig, file: Path) -> str:
    """A name that means `model`: its published one, or that of a file which is written."""
    try:
        if resolve_model(model.title, {}) == model:
            return model.title
    except PlannerError:
        pass  # it has no published name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(model.model_dump_json(), encoding="utf-8")
    return str(file)
