"""Strategies run over a recorded table, without the rest of a search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from planner.core.schema import MeasurementRecord
from search.loop.replay import Replay
from search.loop.space import setting_id
from search.loop.strategies.strategy import Situation, Strategy


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
