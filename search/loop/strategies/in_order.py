"""Candidates in a given order: every one, or one before those of another strategy."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.schema import MeasurementRecord
from search.loop.space import Candidate
from search.loop.strategies.strategy import Choice, Situation, Strategy


class ListStrategy:
    """Candidates in a given order, each once, but for those that other tuners are probing."""

    stopped_because = "every candidate is probed"

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.known: set[str] = set()

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        if not record.inconclusive:
            self.known.add(candidate.id)

    def ask(self, situation: Situation) -> Choice | None:
        taken = {*self.known, *situation.busy}
        return next((Choice(c) for c in self.candidates if c.id not in taken), None)


class StartingWith:
    """One candidate, where it is not known yet, and then what another strategy asks for."""

    def __init__(self, first: Candidate, strategy: Strategy) -> None:
        self.first, self.strategy = first, strategy
        self.is_known = False

    @property
    def stopped_because(self) -> str:
        return self.strategy.stopped_because

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        self.is_known |= candidate.id == self.first.id and not record.inconclusive
        self.strategy.tell(candidate, record)

    def ask(self, situation: Situation) -> Choice | None:
        if self.is_known or self.first.id in situation.busy:
            return self.strategy.ask(situation)
        return Choice(self.first, "calibrate")
