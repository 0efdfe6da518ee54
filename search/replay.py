"""A recorded table in place of a device: strategies run over it, charged its seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from planner.errors import PlannerError, UsageError
from planner.schema import DeviceInfo, MeasurementRecord
from search.probe.evidence import is_feasible
from search.space import Candidate, setting_id, space_of
from search.strategies.strategy import Situation, Strategy

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


def pooled(records: Iterable[MeasurementRecord]) -> list[MeasurementRecord]:
    """One record per setting: of repeats that all ran, their samples together; else the first that
    did not. For comparing strategies, which should not differ by which repeat they were given."""
    grouped: dict[str, list[MeasurementRecord]] = {}
    for record in records:
        grouped.setdefault(setting_id(record.setting), []).append(record)
    return [_pool(group) for group in grouped.values()]


def _pool(group: list[MeasurementRecord]) -> MeasurementRecord:
    failed = [r for r in group if r.status != "measured"]
    if failed or len(group) == 1:
        return (failed or group)[0]
    samples = tuple(s for r in group for s in r.step_seconds)
    setting = group[0].setting
    rate = setting.batch_size * setting.accumulate / median(samples)
    return group[0].model_copy(update={"step_seconds": samples, "images_per_second": rate})


@dataclass(frozen=True)
class Step:
    """After one probe: how many were made, recorded seconds spent, the best rate so far in
    images/s (0 before any fits)."""

    probes: int
    seconds: float
    best_rate: float


def run_strategy(
    strategy: Strategy, replay: Replay, budget_bytes: int | None, max_probes: int | None = None
) -> list[Step]:
    """Lets a strategy search a table until it stops; one Step per probe."""
    rates = replay.rates(budget_bytes)
    steps: list[Step] = []
    seconds, best = 0.0, 0.0
    while max_probes is None or len(steps) < max_probes:
        choice = strategy.ask(Situation())
        if choice is None:
            break
        record = replay.probe(choice.candidate)
        strategy.tell(choice.candidate, record)
        seconds += record.probe_seconds
        best = max(best, rates.get(choice.candidate.id, 0.0))
        steps.append(Step(len(steps) + 1, seconds, best))
    return steps


def probes_to_within(steps: list[Step], best_rate: float, share: float) -> Step | None:
    """The first step whose best is within `share` of `best_rate`; None where none was."""
    return next((s for s in steps if s.best_rate >= best_rate * (1 - share)), None)
