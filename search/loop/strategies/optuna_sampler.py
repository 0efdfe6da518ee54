"""One of Optuna's samplers as a strategy."""

from __future__ import annotations

from random import Random

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from planner.core.schema import MeasurementRecord
from search.loop.space import Candidate, Space
from search.loop.strategies.strategy import Choice, Situation
from search.loop.study.params import SpaceParams, constraint
from search.probe.evidence import is_feasible

MAX_REPEATS = 8  # Optuna's samplers repeat points; after so many in a row one is drawn


def tpe_sampler(seed: int) -> BaseSampler:
    """Optuna's TPESampler, which draws its first five points at random."""
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)


class SamplerStrategy:
    """An Optuna sampler as a strategy, in a study of its own in memory.

    Each point that it draws is told as failed at once. Every result, asked for or not, is added as
    a complete trial, and once more whenever its point is drawn again, so that the sampler moves on.
    What did not fit violates a constraint and, since GPSampler fits such trials too, has the
    slowest rate measured instead of 0.
    """

    stopped_because = "every candidate is probed"

    def __init__(self, space: Space, sampler: BaseSampler, budget_bytes: int | None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.budget_bytes = space, budget_bytes
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self.params = SpaceParams(space)
        self.told: dict[str, MeasurementRecord] = {}
        self.random = Random(0)

    def ask(self, situation: Situation) -> Choice | None:
        taken = {*self.told, *situation.busy}
        free = [c for c in self.space.candidates if c.id not in taken]
        if not free:
            return None
        for _ in range(MAX_REPEATS):
            drawn = self.study.ask(self.params.distributions)
            self.study.tell(drawn, state=TrialState.FAIL)
            found = self.params.candidate(drawn.params)
            if found is not None and found.id not in taken:
                return Choice(found)
            if found is not None and found.id in self.told:
                self._add(found)
        return Choice(self.random.choice(free))

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
        is_strange = self.space.find(candidate.setting) is None
        if not record.inconclusive and candidate.id not in self.told and not is_strange:
            self.told[candidate.id] = record
            self._add(candidate)

    def _add(self, candidate: Candidate) -> None:
        record = self.told[candidate.id]
        self.study.add_trial(
            optuna.create_trial(
                params=self.params.of(candidate),
                distributions=self.params.distributions,
                value=self._value(record),
                constraints={"memory": constraint(record, self.budget_bytes)},
            )
        )

    def _value(self, record: MeasurementRecord) -> float:
        fitting = [r for r in self.told.values() if is_feasible(r, self.budget_bytes)]
        known = [r.images_per_second for r in fitting if r.images_per_second is not None]
        is_fitting = is_feasible(record, self.budget_bytes)
        value = record.images_per_second if is_fitting else min(known, default=1.0)
        return value or 1.0
