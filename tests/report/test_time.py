"""Where the time goes, as text: every second once, the largest first, each kind with its bounds."""

from __future__ import annotations

import pytest

from planner.report.time import shares, time_lines, time_tables
from planner.throughput.parts import Accounts, Part


class Step(Accounts):
    parts = (
        Part("forward", "matmul", "matrix units", 0.010),
        Part("backward", "matmul", "bandwidth", 0.005),
        Part("backward", "matmul", "matrix units", 0.015),
        Part("backward", "copy", "bandwidth", 0.060),
        Part("optimizer", "pointwise", "kernel starts", 0.0101),
    )


def test_each_sum_holds_every_second_once() -> None:
    step = Step()
    for sums in (step.phase_seconds, step.kind_seconds, step.bound_seconds):
        assert sum(sums.values()) == pytest.approx(0.1001)
    assert step.bounds_of("matmul") == pytest.approx({"matrix units": 0.025, "bandwidth": 0.005})


def test_lines_name_the_largest_first_and_leave_out_what_is_tiny() -> None:
    assert time_lines("the step", Step()) == [
        "What limits the step, in shares of its time: bandwidth 65%, matrix units 25%, kernel "
        "starts 10%.",
        "By operation: copy 60%, matmul 30%, pointwise 10%.",
        "By phase: backward 80%, optimizer 10%, forward 10%.",
    ]
    assert shares({"a": 1.0, "b": 0.004}) == "a 100%"


def test_tables_say_what_bounds_each_kind_over_all_phases() -> None:
    rows = [line.split(maxsplit=4) for line in time_tables("the step", Step()).splitlines()]
    assert ["backward", "80", "ms", "79.9%"] in rows
    assert ["matmul", "30", "ms", "30.0%", "matrix units 83%, bandwidth 17%"] in rows
