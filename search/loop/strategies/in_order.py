"""Candidates in a given order: every one, or one before those of another strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from search.loop.space import Candidate
from search.loop.strategies.strategy import Choice, Situation, Strategy
from search.probe.kinds import RecordT, SettingT


class ListStrategy(Generic[SettingT, RecordT]):
    """Candidates in a given order, each once, but for those that other tuners are probing."""

    stopped_because = "every candidate is probed"

    def __init__(self, candidates: Sequence[Candidate[SettingT]]) -> None:
        self.candidates = candidates
        self.known: set[str] = set()

    def tell(self, candidate: Candidate[SettingT], record: RecordT) -> None:
        if not record.inconclusive:
            self.known.add(candidate.id)

    def ask(self, situation: Situation) -> Choice[SettingT] | None:
        taken = {*self.known, *situation.busy}
        return next((Choice(c) for c in self.candidates if c.id not in taken), None)


class StartingWith(Generic[SettingT, RecordT]):
    """One candidate, where it is not known yet, and then what another strategy asks for."""

    def __init__(self, first: Candidate[SettingT], strategy: Strategy[SettingT, RecordT]) -> None:
        self.first, self.strategy = first, strategy
        self.is_known = False

    @property
    def stopped_because(self) -> str:
        return self.strategy.stopped_because

    def tell(self, candidate: Candidate[SettingT], record: RecordT) -> None:
        self.is_known |= candidate.id == self.first.id and not record.inconclusive
        self.strategy.tell(candidate, record)

    def ask(self, situation: Situation) -> Choice[SettingT] | None:
        if self.is_known or self.first.id in situation.busy:
            return self.strategy.ask(situation)
        return Choice(self.first, "calibrate")
