"""One of Optuna's samplers as a strategy."""

from __future__ import annotations

from random import Random
from typing import Any, Generic

import optuna
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState

from search.loop.space import Candidate, Space
from search.loop.strategies.strategy import Choice, Situation
from search.loop.study.params import SpaceParams, constraint
from search.probe.evidence import is_feasible
from search.probe.kinds import RecordT, SettingT

MAX_REPEATS = 8  # Optuna's samplers repeat points; after so many in a row one is drawn


def tpe_sampler(seed: int) -> BaseSampler:
    """Optuna's TPESampler, which draws its first five points at random."""
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)


class SamplerStrategy(Generic[SettingT, RecordT]):
    """An Optuna sampler as a strategy, in a study of its own in memory.

    A point it repeats is told again as it was measured, so that it moves on, and not probed.
    A probe that did not fit is told as complete with a violated constraint and, since GPSampler
    fits such trials too, with the slowest rate measured instead of 0.
    """

    def __init__(
        self, space: Space[SettingT], sampler: BaseSampler, budget_bytes: int | None
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.budget_bytes = space, budget_bytes
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self.params = SpaceParams(space)
        self.open: dict[str, Trial] = {}
        self.told: dict[str, RecordT] = {}
        self.stopped_because = ""
        self.random = Random(0)

    def ask(self, situation: Situation) -> Choice[SettingT] | None:
        taken = {*self.told, *situation.busy}
        if all(c.id in taken for c in self.space.candidates):
            self.stopped_because = "every candidate is probed"
            return None
        for _ in range(MAX_REPEATS):
            trial = self.study.ask()
            found = self.params.candidate(_suggest(trial, self.params))
            if found is not None and found.id not in taken:
                self.open[found.id] = trial
                return Choice(found)
            self._tell_again(trial, found)
        return Choice(self.random.choice([c for c in self.space.candidates if c.id not in taken]))

    def _tell_again(self, trial: Trial, found: Candidate[SettingT] | None) -> None:
        if found is not None and found.id in self.told:
            self._tell(trial, self.told[found.id])
        else:
            self.study.tell(trial, state=TrialState.FAIL)  # no such setting, or another's

    def tell(self, candidate: Candidate[SettingT], record: RecordT) -> None:
        if candidate.id in self.told or self.space.find(candidate.setting) is None:
            return
        if record.inconclusive:
            cut = self.open.pop(candidate.id, None)
            if cut is not None:
                self.study.tell(cut, state=TrialState.FAIL)
            return
        self.told[candidate.id] = record
        trial = self.open.pop(candidate.id, None)
        if trial is not None:
            self._tell(trial, record)
        else:
            self.study.add_trial(self._finished(candidate, record))

    def _tell(self, trial: Trial, record: RecordT) -> None:
        trial.set_constraint("memory", constraint(record, self.budget_bytes))
        self.study.tell(trial, self._value(record))

    def _finished(self, candidate: Candidate[SettingT], record: RecordT) -> FrozenTrial:
        """A trial for a probe that this strategy did not ask for."""
        return optuna.create_trial(
            params=self.params.of(candidate),
            distributions=self.params.distributions,
            value=self._value(record),
            constraints={"memory": constraint(record, self.budget_bytes)},
        )

    def _value(self, record: RecordT) -> float:
        rates = [
            r.images_per_second for r in self.told.values() if is_feasible(r, self.budget_bytes)
        ]
        known = [r for r in rates if r is not None]
        feasible = is_feasible(record, self.budget_bytes)
        value = record.images_per_second if feasible else min(known, default=1.0)
        return value or 1.0


def _suggest(trial: Trial, params: SpaceParams[SettingT]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, distribution in params.distributions.items():
        if isinstance(distribution, IntDistribution):
            found[name] = trial.suggest_int(name, distribution.low, distribution.high)
        elif isinstance(distribution, CategoricalDistribution):
            found[name] = trial.suggest_categorical(name, distribution.choices)
    return found
