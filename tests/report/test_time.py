"""Where the time goes, as text: every second once, the largest first, each kind with its bounds."""

import shlex
import sys

import pytest

from planner.report import text as terminal
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
