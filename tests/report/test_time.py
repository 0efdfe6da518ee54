"""Where the time goes, as text: every second once, the largest first, each kind with its bounds."""

from __future__ import annotations

import shlex
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.report import text as terminal
from planner.report.step import step_live_bytes
from planner.report.text import parts_text
from planner.report.time import bound_text, shares, time_parts
from planner.throughput.result import Accounts, Part
from tests.report.ledgers import layered_ledger


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


# The bytes alive over a step, on a ledger small enough to follow.

MIB = 1024**2


def test_the_steady_step_is_walked() -> None:
    live = step_live_bytes(layered_ledger())
    # Weights 4 × 8 and state 4 × 16 are held from the first step on; 4 × 100 are saved and the last
    # layer's 30 of scratch come on top: 526 MiB, first in the forward of layer 3.
    assert live.total[0] == 96 * MIB
    assert live.peak_bytes == 526 * MIB
    at_peak = {c: points[live.peak] // MIB for c, points in live.by_category.items()}
    assert at_peak == {
        "parameters": 32, "buffers": 0, "gradients": 0, "optimizer_state": 64, "activations": 400,
        "temporaries": 30,
    }  # fmt: skip
    assert [p.name for p in live.phases] == ["forward", "backward", "optimizer", "zero_grad"]
    assert live.total[live.phases[2].start - 1] == (96 + 32) * MIB  # gradients after backward
    assert live.total[-1] == 96 * MIB


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3))
def test_categories_add_up(num_layers: int, num_micro_batches: int) -> None:
    live = step_live_bytes(layered_ledger(num_layers, num_micro_batches))
    for point, total in enumerate(live.total):
        assert total == sum(points[point] for points in live.by_category.values())
    assert [p.start for p in live.phases[1:]] == [p.stop for p in live.phases[:-1]]
    assert live.phases[-1].stop == len(live.total)


# What is printed fits the terminal it is printed on, and is whole where there is none.

COMMAND = (
    "planner estimate timm:swin_large_patch4_window7_224 --batch-size 64 --compile reduce-overhead "
    "--set memory_format=channels_last --gpu rtx-3090 --json | planner tune --from - --trials 3"
)
ROWS = [["1", "183", "9.11–20.71 GiB", "checkpointing selective, compile reduce-overhead"]] * 2
HEADERS = ("way", "images/s", "device\ntotal", "check-\npointing")


@pytest.fixture(params=[60, 80, 100, 200])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def test_lines_are_as_wide_as_the_terminal(columns: int) -> None:
    texts = [
        terminal.wrapped("word " * 99),
        terminal.table_text(ROWS, HEADERS),
        terminal.command_text(COMMAND),
    ]
    for text in texts:
        assert max(map(len, text.splitlines())) <= min(columns, terminal.WIDTH), text


def test_a_broken_command_is_the_command(columns: int) -> None:
    text = terminal.command_text(COMMAND)
    assert shlex.split(text.replace("\\\n", " ")) == shlex.split(COMMAND)


def test_a_table_that_is_too_wide_breaks_its_longest_text(columns: int) -> None:
    lines = terminal.table_text(ROWS, HEADERS).splitlines()
    rows = lines[3:]  # below two lines of headers and the rule
    assert len(rows) == len(ROWS) * (2 if columns < 80 else 1)
    assert all("9.11–20.71 GiB" in row for row in rows[:: len(rows) // len(ROWS)])


def test_without_a_terminal_everything_is_whole() -> None:
    assert terminal.width() == terminal.WIDTH
    assert terminal.command_text(COMMAND) == f"  {COMMAND}"
    assert "---" in terminal.table_text([["x" * 300]], ["name"])
