"""A recorded table in place of a device: a search runs over it, charged its seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from statistics import median
from typing import TypeVar

from planner.errors import PlannerError, UsageError
from planner.schema import DeviceInfo, MeasurementRecord
from planner.schema.record import BUDGET_ENDED
from search.limits import Limits
from search.probe.evidence import is_feasible
from search.space import Candidate, setting_id, space_of
from search.strategies.strategy import Choice

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
        """The next record of a candidate; the first again after the last."""
        records = self.records[candidate.id]
        turn = self.asked.get(candidate.id, 0)
        self.asked[candidate.id] = turn + 1
        return records[turn % len(records)]

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
        end = self.limits.seconds_to_end()
        if end is not None and record.probe_seconds > end:  # a device's would have been cut short
            ended = {"status": "timed_out", "step_seconds": (), "images_per_second": None,
                     "compile_seconds": None, "probe_seconds": end,
                     "flags": (BUDGET_ENDED,)}  # fmt: skip
            record = record.model_copy(update=ended)
        self.limits.spent_seconds += record.probe_seconds
        return record
