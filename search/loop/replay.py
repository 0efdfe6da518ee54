"""A recorded table in place of a device: a search runs over it, charged its seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from statistics import median
from typing import TypeVar

from planner.core.errors import PlannerError, UsageError
from planner.core.files import MAX_RESULT_BYTES, TUNE_PROBES, TUNE_RESULT, parse_json, read_text
from planner.core.schema import DeviceInfo, MeasurementRecord, parse
from planner.core.schema.record import BUDGET_ENDED, Recommendation
from search.loop.limits import Limits
from search.loop.space import Candidate, setting_id, space_of
from search.loop.strategies.strategy import Choice
from search.loop.study.records import read_records
from search.loop.study.study import is_replayed
from search.probe.evidence import is_feasible

T = TypeVar("T")


class Replay:
    """Recorded probes of one model on one device, asked for by candidate.

    A setting that was recorded several times gives its records in turn. Raises UsageError for a
    table that mixes models or devices, PlannerError for an empty one.
    """

    def __init__(self, records: Iterable[MeasurementRecord], source: str = "the table") -> None:
        self.records: dict[str, list[MeasurementRecord]] = {}
        self.asked: dict[str, int] = {}
        for record in records:
            self.records.setdefault(setting_id(record.setting), []).append(record)
        if not self.records:
            raise PlannerError(f"{source} holds no records to replay.")
        self.model = _only({r.model for r in self._all()}, "model", source)
        self.device = _only(_unlike(r.device for r in self._all()), "device", source)
        self.versions = self._all()[0].versions
        self.space = space_of(rs[0].setting for rs in self.records.values())

    def _all(self) -> list[MeasurementRecord]:
        return [record for records in self.records.values() for record in records]

    def probe(self, candidate: Candidate) -> MeasurementRecord:
        """The next record of a candidate, as one more probe; the first again after the last."""
        records = self.records[candidate.id]
        turn = self.asked.get(candidate.id, 0)
        self.asked[candidate.id] = turn + 1
        return records[turn % len(records)].model_copy()

    def rates(self, budget_bytes: int | None) -> dict[str, float]:
        """Images/s of every candidate that ran within the budget, over all its records."""
        found = {}
        for c in self.space.candidates:
            good = [r for r in self.records[c.id] if is_feasible(r, budget_bytes)]
            if good:
                found[c.id] = c.images / median([s for r in good for s in r.step_seconds])
        return found


def _unlike(devices: Iterable[DeviceInfo]) -> list[DeviceInfo]:
    """One of each kind: cards that are alike are one device, whichever of them ran a probe."""
    found: list[DeviceInfo] = []
    for device in devices:
        if not any(device.is_like(other) for other in found):
            found.append(device)
    return found


def _only(values: Collection[T], kind: str, source: str) -> T:
    if len(values) > 1:
        raise UsageError(
            f"{source} holds records of {len(values)} {kind}s, and a replay is of one.",
            "Split the file.",
        )
    return next(iter(values))


class ReplayProber:
    """A prober over a recorded table that charges recorded seconds to the limits."""

    def __init__(self, replay: Replay, limits: Limits) -> None:
        self.replay = replay
        self.limits = limits

    def __call__(self, choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        record = self.replay.probe(choice.candidate)
        end = self.limits.seconds_left()
        if end is not None and record.probe_seconds > end:  # a device's would have been cut short
            ended = {"status": "timed_out", "step_seconds": (), "images_per_second": None,
                     "compile_seconds": None, "probe_seconds": end,
                     "flags": (BUDGET_ENDED,)}  # fmt: skip
            record = record.model_copy(update=ended)
        self.limits.spent_seconds += record.probe_seconds
        return record


def refuse_measured(folder: Path) -> None:
    """A replay puts what it found in place of what a replay left, and of nothing else. Raises
    UsageError where `folder` holds what was measured, or what cannot be read."""
    said = _measured_in(folder)
    if said:
        raise UsageError(
            f"{said}, and a replay writes only over what another replay left.",
            "Choose another --output, or omit it: the result is printed too.",
        )


def _measured_in(folder: Path) -> str:
    """What of a folder no replay left; "" where nothing is lost with it."""
    probes, result = folder / TUNE_PROBES, folder / TUNE_RESULT
    file = read_records(probes)
    number = sum(not is_replayed(r) for r in file.records)
    if number:
        return f"{probes} holds {number} probe{'s' * (number > 1)} made on a device"
    if file.fault:
        return file.fault
    if not result.exists():
        return ""
    found = parse(
        Recommendation, parse_json(read_text(result, MAX_RESULT_BYTES), str(result)), str(result)
    )
    if found.evidence is not None:
        measured = not is_replayed(found.evidence)
    else:  # nothing fitted: a replay's probes lie beside it
        measured = found.num_probes > len(file.records)
    return f"{result} is of {found.num_probes} probes made on a device" if measured else ""
