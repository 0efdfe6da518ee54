"""What is printed fits the terminal it is printed on, and is whole where there is none."""

from __future__ import annotations

import shlex
import sys

import pytest

from planner.report import text as terminal

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
