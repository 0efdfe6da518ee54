"""Strategies run over a recorded table, without the rest of a search."""

from __future__ import annotations

from dataclasses import dataclass

from search.loop.replay import Replay
from search.loop.strategies.strategy import Situation, Strategy


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
