"""A space as Optuna has it: its parameters, their distributions, and the memory constraint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from planner.core.schema import MeasurementRecord
from search.loop.space import Candidate, Space


class SpaceParams:
    """The parameters of a space: `batch_rung` (or `workers_rung`), the position in the ladder,
    whose order is what matters, and, where there is a choice, each axis.

    Optuna holds a categorical parameter to the values with which a study first had it. Where those
    of the study at hand (`known`) are others, the axis gets a name of its own, made of its values.
    """

    def __init__(self, space: Space, known: Mapping[str, BaseDistribution] | None = None) -> None:
        self.space = space
        self.rung = f"{space.rung_field.removesuffix('_size')}_rung"
        choices = {
            axis: CategoricalDistribution(values)
            for axis, values in space.choices.items()
            if len(values) > 1
        }
        self.axes = {_name(axis, ours, known or {}): axis for axis, ours in choices.items()}
        self.distributions: dict[str, BaseDistribution] = {
            self.rung: IntDistribution(0, len(space.rungs) - 1),
            **{name: choices[axis] for name, axis in self.axes.items()},
        }
        self._candidates = {_key(self.of(c)): c for c in space.candidates}

    def of(self, c: Candidate) -> dict[str, Any]:
        """A candidate as parameters."""
        rung = self.space.rungs.index(getattr(c.setting, self.space.rung_field))
        return {self.rung: rung, **{n: getattr(c.setting, axis) for n, axis in self.axes.items()}}

    def candidate(self, params: Mapping[str, Any]) -> Candidate | None:
        """The candidate of parameters; None where the space lacks the combination."""
        return self._candidates.get(_key(params))


def _name(axis: str, ours: CategoricalDistribution, known: Mapping[str, BaseDistribution]) -> str:
    if known.get(axis, ours) == ours:
        return axis
    return f"{axis} of {', '.join(map(str, ours.choices))}"


def _key(params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items()))


def constraint(record: MeasurementRecord, budget_bytes: int | None) -> float:
    """How far a record is over its budget, as a share: 0 or less is feasible, 1 a failed probe."""
    if record.status != "measured":
        return 1.0
    num_bytes = record.used_bytes
    if budget_bytes is None or num_bytes is None:
        return -1.0
    return num_bytes / budget_bytes - 1.0
