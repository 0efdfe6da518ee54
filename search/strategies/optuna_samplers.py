"""The meeting with Optuna: our strategy as a sampler of any study, its samplers as strategies."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from random import Random
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from planner.errors import PlannerError, unknown_name
from planner.schema import DeviceInfo, MeasurementRecord, Model
from search.probe.evidence import is_feasible
from search.space import AXES, Candidate, Space
from search.strategies.planner_strategy import PlannerStrategy
from search.strategies.strategy import Choice, Situation
from search.surrogate.prior import Prior

RUNG = "batch_rung"  # the position of the micro-batch in the ladder: its order is what matters
BYTES_ATTR = "planner:bytes"
SAMPLERS = ("tpe", "gp", "random")
MAX_REPEATS = 8  # Optuna's samplers repeat points; after so many in a row one is drawn


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The parameters of a space: `batch_rung` and, where there is a choice, each axis."""
    found: dict[str, BaseDistribution] = {RUNG: IntDistribution(0, len(space.rungs) - 1)}
    for axis in AXES:
        if len(space.choices[axis]) > 1:
            found[axis] = CategoricalDistribution(space.choices[axis])
    return found


def to_params(space: Space, c: Candidate) -> dict[str, Any]:
    """A candidate as Optuna parameters."""
    axes = {a: getattr(c.setting, a) for a in AXES if len(space.choices[a]) > 1}
    return {RUNG: space.rungs.index(c.setting.batch_size), **axes}


def from_params(space: Space, params: Mapping[str, Any]) -> Candidate | None:
    """The candidate of Optuna parameters; None where the combination is not in the space."""
    index = _by_params(space).get(_key(params))
    return None if index is None else space.candidates[index]


def suggest(trial: Trial, space: Space) -> Candidate | None:
    """For an objective of one's own: the candidate a trial stands for, None for a combination that
    the space lacks (prune it)."""
    return from_params(space, _suggest_params(trial, distributions(space)))


def _suggest_params(trial: Trial, named: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for name, distribution in named.items():
        if isinstance(distribution, IntDistribution):
            params[name] = trial.suggest_int(name, distribution.low, distribution.high)
        elif isinstance(distribution, CategoricalDistribution):
            params[name] = trial.suggest_categorical(name, distribution.choices)
    return params


def _key(params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items()))


def _by_params(space: Space) -> dict[tuple[tuple[str, Any], ...], int]:
    cached: dict[tuple[tuple[str, Any], ...], int] | None = getattr(space, "_by_params", None)
    if cached is None:
        cached = {_key(to_params(space, c)): i for i, c in enumerate(space.candidates)}
        object.__setattr__(space, "_by_params", cached)
    return cached


class PlannerSampler(BaseSampler):  # type: ignore[misc]
    """The default strategy as a sampler for a single-objective study that maximises images/s.

    The objective calls `suggest(trial, space)`, returns images/s, says that a setting does not fit
    with `trial.set_constraint("memory", excess)` (above 0), and may say the bytes it took with
    `trial.set_user_attr(BYTES_ATTR, n)`. Raises ValueError in a study that minimises.
    """

    def __init__(
        self, space: Space, prior: Prior, model: Model, device: DeviceInfo,
        budget_bytes: int | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        self.space, self.prior = space, prior
        self.model, self.device, self.budget_bytes = model, device, budget_bytes
        self.fallback = optuna.samplers.RandomSampler(seed)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        if study.direction != optuna.study.StudyDirection.MAXIMIZE:
            raise ValueError("PlannerSampler maximises images/s: create the study so")
        return distributions(self.space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        strategy = PlannerStrategy(
            self.space, self.prior, self.budget_bytes, tolerance=0.0, finalists=False
        )
        busy = set()
        for other in study.get_trials(deepcopy=False):
            found = from_params(self.space, other.params)
            if found is None or other.number == trial.number:
                continue
            if other.state in (TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED):
                strategy.tell(found, self._record(found, other))
            elif other.state == TrialState.RUNNING:
                busy.add(found.id)
        choice = strategy.ask(Situation(busy=busy))
        return to_params(self.space, choice.candidate) if choice else {}

    def _record(self, c: Candidate, trial: FrozenTrial) -> MeasurementRecord:
        """What a trial says, as the record its probe would have left."""
        failed = trial.state != TrialState.COMPLETE
        infeasible = failed or any(v > 0 for v in trial.constraints.values()) or not trial.value
        status = "crashed" if failed else "out_of_memory" if infeasible else "measured"
        num_bytes = trial.user_attrs.get(BYTES_ATTR)
        seconds = () if infeasible else (c.images / float(trial.value or 1.0),)
        return MeasurementRecord(
            model=self.model, setting=c.setting, device=self.device, versions={}, date="",
            status=status,
            step_seconds=seconds, images_per_second=None if infeasible else trial.value,
            peak_allocated_bytes=num_bytes, device_bytes=num_bytes,
        )  # fmt: skip

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return self.fallback.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        self.fallback.reseed_rng()


def make_sampler(name: str, seed: int) -> BaseSampler:
    """An Optuna sampler by its name here. `gp` imports torch and scipy. Raises UsageError,
    PlannerError where scipy is missing."""
    kinds = {
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed, n_startup_trials=5),
        "gp": lambda: optuna.samplers.GPSampler(seed=seed, n_startup_trials=5),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
    }
    if name not in kinds:
        raise unknown_name("strategy", name, SAMPLERS)
    if name == "gp" and importlib.util.find_spec("scipy") is None:
        raise PlannerError(
            "the gp strategy (Optuna's GPSampler) needs scipy, which is not installed.",
            "Install it with: pip install 'planner[gp]'",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler: BaseSampler = kinds[name]()
    return sampler


class SamplerStrategy:
    """An Optuna sampler as a strategy, in a study of its own in memory.

    A point it repeats is told again as it was measured, so that it moves on, and not probed.
    A probe that did not fit is told as complete with a violated constraint and, since GPSampler
    fits such trials too, with the slowest rate measured instead of 0.
    """

    def __init__(
        self, space: Space, sampler: BaseSampler, budget_bytes: int | None,
        first: Candidate | None = None,
    ) -> None:  # fmt: skip
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.budget_bytes = space, budget_bytes
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self.named = distributions(space)
        self.open: dict[str, Trial] = {}
        self.told: dict[str, MeasurementRecord] = {}
        self.stopped_because = ""
        self.random = Random(0)
        if first is not None:
            self.study.enqueue_trial(to_params(space, first), skip_if_exists=True)

    def ask(self, situation: Situation) -> Choice | None:
        taken = {*self.told, *situation.busy}
        if all(c.id in taken for c in self.space.candidates):
            self.stopped_because = "every candidate is probed"
            return None
        for _ in range(MAX_REPEATS):
            trial = self.study.ask()
            found = from_params(self.space, _suggest_params(trial, self.named))
            if found is not None and found.id not in taken:
                self.open[found.id] = trial
                return Choice(found)
            self._tell_again(trial, found)
        return Choice(self.random.choice([c for c in self.space.candidates if c.id not in taken]))

    def _tell_again(self, trial: Trial, found: Candidate | None) -> None:
        if found is not None and found.id in self.told:
            self._tell(trial, self.told[found.id])
        else:
            self.study.tell(trial, state=TrialState.FAIL)  # no such setting, or another's

    def tell(self, candidate: Candidate, record: MeasurementRecord) -> None:
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

    def _tell(self, trial: Trial, record: MeasurementRecord) -> None:
        trial.set_constraint("memory", constraint(record, self.budget_bytes))
        self.study.tell(trial, self._value(record))

    def _finished(self, candidate: Candidate, record: MeasurementRecord) -> FrozenTrial:
        """A trial for a probe that this strategy did not ask for."""
        return optuna.create_trial(
            params=to_params(self.space, candidate),
            distributions=self.named,
            value=self._value(record),
            constraints={"memory": constraint(record, self.budget_bytes)},
        )

    def _value(self, record: MeasurementRecord) -> float:
        rates = [
            r.images_per_second for r in self.told.values() if is_feasible(r, self.budget_bytes)
        ]
        known = [r for r in rates if r is not None]
        feasible = is_feasible(record, self.budget_bytes)
        value = record.images_per_second if feasible else min(known, default=1.0)
        return value or 1.0


def constraint(record: MeasurementRecord, budget_bytes: int | None) -> float:
    """How far a record is over its budget, as a share: 0 or less is feasible, 1 a failed probe."""
    if record.status != "measured":
        return 1.0
    num_bytes = record.used_bytes
    if budget_bytes is None or num_bytes is None:
        return -1.0
    return num_bytes / budget_bytes - 1.0
