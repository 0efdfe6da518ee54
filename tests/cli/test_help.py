"""What --help shows: groups of commands, options under headings, examples that run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from planner.cli import COMMANDS, EXAMPLES, cli, main
from planner.cli.command import OTHERS, Command
from planner.cli.help import find_command
from tests.reference import REFERENCE, planner_context, reference


def _commands() -> Iterator[click.Context]:
    """Every command that runs, also those of a group."""
    for name in COMMANDS:
        found = find_command(planner_context(), (name,))
        if not isinstance(found.command, click.Group):
            yield found
            continue
        for own in found.command.list_commands(found):
            yield find_command(found, (own,))


ALL = {found.command_path: found for found in _commands()}


def _shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_the_reference_is_that_of_the_commands() -> None:
    assert REFERENCE.read_text("utf-8") == reference(), "run 'python -m tests.reference'"


@pytest.mark.parametrize("path", ALL)
def test_each_option_stands_once_under_a_heading(path: str) -> None:
    found = ALL[path]
    command = found.command
    assert isinstance(command, Command), "give it cls=Command"
    sections = command.sections(found)
    written = [record for _, records in sections for record in records]
    options = [p for p in command.get_params(found) if isinstance(p, click.Option)]
    assert len(written) == len(set(written)) == len(options)
    assert OTHERS not in dict(sections), "give it a place in planner.cli.command.HEADINGS"
    shown = command.get_help(found)
    assert all(f"\n{heading}:\n" in shown for heading, _ in sections)


@pytest.mark.parametrize("path", ALL)
def test_examples_are_ones_that_the_command_reads(path: str) -> None:
    command = ALL[path].command
    assert isinstance(command, Command)
    assert command.examples
    for example in command.examples:
        assert shlex.split(example)[: len(path.split())] == path.split()
        _read(example)
        assert f"  {example}" in command.get_help(ALL[path]).splitlines()


def test_the_examples_of_all_are_read_too() -> None:
    for example in EXAMPLES:
        _read(example)


def _words(example: str) -> list[str]:
    """Those of the command, before a shell's own."""
    return shlex.split(re.split(" [|>] ", example)[0])


def _read(example: str) -> None:
    """Reads an example as its command would, and stops before it runs."""
    program, *arguments = _words(example)
    assert program == "planner"
    context = planner_context()
    command: click.Command = cli
    while isinstance(command, click.Group):
        name, found, arguments = command.resolve_command(context, arguments)
        assert found is not None
        command = found
    command.make_context(name, arguments, parent=context)


def test_help_is_asked_for_in_several_ways(capsys: pytest.CaptureFixture[str]) -> None:
    for typed in (["help", "bench", "attention"], ["bench", "attention", "-h"]):
        assert _shown(typed, capsys) == _shown(["bench", "attention", "--help"], capsys)
    assert main(["help", "tun"]) == 2
    assert "unknown command 'tun'. Did you mean 'tune'?" in capsys.readouterr().err
