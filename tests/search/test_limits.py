"""How long a probe may take before it is taken for hung."""

from __future__ import annotations

from planner.schema import TrainSetting
from search.limits import probe_deadline
from search.space import Candidate
from search.strategies.strategy import Choice
from search.surrogate.prior import KernelScales, Prior
from search.surrogate.probe_cost import EIGHT_BIT_SECONDS


def test_an_8bit_optimizer_may_compile_where_nothing_else_does() -> None:
    kernel = KernelScales.__new__(KernelScales)  # no scale is read here
    deadline = probe_deadline(Prior((), kernel, kernel, "a guess"))

    def seconds(optimizer: str) -> float:
        return deadline(Choice(Candidate("a", TrainSetting(optimizer=optimizer), "arm")))

    assert seconds("adamw-8bit") - seconds("adamw") == 5 * EIGHT_BIT_SECONDS
