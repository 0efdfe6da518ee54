"""Where the time goes, as text: every second once, the largest first, each kind with its bounds."""

from __future__ import annotations

import pytest

from planner.report.text import parts_text
from planner.report.time import bound_text, shares, time_parts
from planner.throughput.result import Accounts, Part


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


def test_a_line_names_the_largest_first_and_leaves_out_what_is_tiny() -> None:
    assert bound_text("the step", Step().bound_seconds) == (
        "What limits the step, in shares of its time: bandwidth 65%, matrix units 25%, kernel "
        "starts 10%"
    )
    assert shares({"a": 1.0, "b": 0.004}) == "a 100%"


def test_tables_say_what_bounds_each_kind_over_all_phases() -> None:
    rows = [line.split(maxsplit=4) for line in parts_text(time_parts(Step())).splitlines()]
    assert ["backward", "80", "ms", "79.9%"] in rows
    assert ["matmul", "30", "ms", "30.0%", "matrix units 83%, bandwidth 17%"] in rows
