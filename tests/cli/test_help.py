"""What --help shows: groups of commands, options under headings, examples that run."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from planner.cli import COMMANDS, EXAMPLES, INSTEAD, cli, main
from planner.cli.options import HEADINGS, Command
from tests.cli.contexts import command_context, planner_context

ALL = {found.command_path: found for found in map(command_context, COMMANDS)}


def _shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("path", ALL)
def test_each_option_stands_once_under_a_heading(path: str) -> None:
    found = ALL[path]
    command = found.command
    assert isinstance(command, Command), "give it cls=Command"
    sections = command.sections(found)
    written = [record for _, records in sections for record in records]
    options = [p for p in command.get_params(found) if isinstance(p, click.Option)]
    assert len(written) == len(set(written)) == len(options)
    assert {heading for heading, _ in sections} <= {*HEADINGS, "Options"}
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
    assert _shown(["tune", "-h"], capsys) == _shown(["tune", "--help"], capsys)
    assert main(["tun"]) == 2
    assert "unknown command 'tun'. Did you mean 'tune'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", INSTEAD)
def test_what_is_no_command_says_what_to_do_instead(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "x"]) == 2
    assert capsys.readouterr().err == f"Error: '{name}' is not a command.\n{INSTEAD[name]}\n"
