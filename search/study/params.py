"""A space as Optuna has it: its parameters, their distributions, and the memory constraint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from planner.schema import MeasurementRecord
from search.space import AXES, Candidate, Space

RUNG = "batch_rung"  # the position of the micro-batch in the ladder: its order is what matters


class SpaceParams:
    """The parameters of a space: `batch_rung` and, where there is a choice, each axis."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.axes = [axis for axis in AXES if len(space.choices[axis]) > 1]
        self.distributions: dict[str, BaseDistribution] = {
            RUNG: IntDistribution(0, len(space.rungs) - 1),
            **{axis: CategoricalDistribution(space.choices[axis]) for axis in self.axes},
        }
        self._candidates = {_key(self.of(c)): c for c in space.candidates}

    def of(self, c: Candidate) -> dict[str, Any]:
        """A candidate as parameters."""
        rung = self.space.rungs.index(c.setting.batch_size)
        return {RUNG: rung, **{axis: getattr(c.setting, axis) for axis in self.axes}}

    def candidate(self, params: Mapping[str, Any]) -> Candidate | None:
        """The candidate of parameters; None where the space lacks the combination."""
        return self._candidates.get(_key(params))


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
