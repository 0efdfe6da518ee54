"""What guides advise, in techniques.md: every technique has one row, its status is counted, and
its files exist."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from planner.cli import cli

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "tests/techniques.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if re.match(r"\| \d", line)
]


def test_the_statuses_are_counted() -> None:
    count = Counter(row[2] for row in ROWS)
    assert set(count) <= {"works", "partly", "absent"}
    said = f"{count['works']} work, {count['partly']} partly, {count['absent']} are absent."
    assert said in " ".join(TEXT.split())


def test_the_files_exist() -> None:
    named = set(re.findall(r"`((?:planner|search|tests|examples)/[\w/.]+?)(?::\w+)?`", TEXT))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


COMMANDS = {
    row[0]: command.group(1)
    for row in ROWS
    if row[2] == "works" and (command := re.match(r"`(planner [^`]+)`", row[3]))
}


def test_what_works_has_a_command_that_can_be_typed() -> None:
    untyped = [row for row in ROWS if row[2] == "works" and row[0] not in COMMANDS]
    assert [row[0] for row in untyped if not row[3].startswith("`python examples/")] == []
    for line in COMMANDS.values():
        _, name, *arguments = shlex.split(line)
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, line
        command.make_context(name, arguments)


ANSWERED = [line for line in dict.fromkeys(COMMANDS.values()) if re.match(
    r"planner (estimate|advise|doctor)( (?!.*--(trace|rates|links|compare))|$)", line
)]  # fmt: skip
"""Those that measure nothing and need no earlier result."""


@pytest.mark.truth
@pytest.mark.parametrize("line", ANSWERED)
def test_a_command_that_shows_what_works_runs(line: str) -> None:
    if "zero" in line:
        pytest.importorskip("deepspeed")
    ended = CliRunner().invoke(cli, shlex.split(line)[1:])
    assert ended.exit_code == 0, ended.output
