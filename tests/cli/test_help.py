"""What --help shows: groups of commands, options under headings, examples that run."""

import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import get_args

import click
import pytest
from click.shell_completion import FishComplete

from planner.cli import COMMANDS, COMPLETION, EXAMPLES, OPTION_HINTS, REPLACEMENTS, cli, main
from planner.cli.options import HEADINGS, Command
from planner.core.errors import _vocabulary
from planner.core.schema import TrainSetting
from planner.core.schema.validation import declared_options
from planner.libraries.names import SPECS
from planner.machine.hardware import all_gpus
from planner.trainers.registry import TARGETS


def planner_context() -> click.Context:
    return click.Context(cli, info_name="planner", terminal_width=100, **cli.context_settings)


def command_context(name: str) -> click.Context:
    """The context in which the command of this name would run."""
    parent = planner_context()
    command = cli.get_command(parent, name)
    assert command is not None
    return click.Context(
        command, info_name=name, parent=parent, help_option_names=parent.help_option_names
    )


ALL = {found.command_path: found for found in map(command_context, COMMANDS)}


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


def _read(example: str) -> None:
    """Reads an example as its command would, before a shell's own words; stops before it runs."""
    program, *arguments = shlex.split(re.split(" [|>] ", example)[0])
    assert program == "planner"
    context = planner_context()
    command: click.Command = cli
    while isinstance(command, click.Group):
        name, found, arguments = command.resolve_command(context, arguments)
        assert found is not None
        command = found
    command.make_context(name, arguments, parent=context)


def test_an_answer_to_a_word_names_commands_that_can_be_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in REPLACEMENTS:
        assert main([name, "x"]) == 2
    answers = [capsys.readouterr().err, *OPTION_HINTS.values()]
    answers += [word.answer for word in _vocabulary().values()]
    for example in re.findall("'(planner [a-z][^']*)'", "\n".join(answers)):
        with suppress(click.MissingParameter):  # a command's name by itself
            _read(example)


# What a shell completes: in process by click's own classes, and in the shells themselves.

PLANNER = Path(sys.executable).with_name("planner")


def complete(*typed: str) -> list[str]:
    """What the last of these words may become."""
    *before, incomplete = typed
    shell = FishComplete(cli, dict(cli.context_settings), "planner", COMPLETION)
    return [item.value for item in shell.get_completions(before, incomplete)]


def test_commands_and_options_are_completed() -> None:
    assert complete("") == list(COMMANDS)
    assert complete("es") == ["estimate"]
    assert complete("estimate", "--max") == ["--max-batch"]


@pytest.mark.parametrize("field", declared_options(TrainSetting))
def test_a_field_with_an_option_has_all_of_it(field: str) -> None:
    """Of `estimate`, `report`, `advise` and `tune`, of which it says the default and the values."""
    said, kind = declared_options(TrainSetting)[field], TrainSetting.model_fields[field]
    flag = said.flag_of(field)
    names = ("estimate", "report", "advise", *(("tune",) if field != "nodes" else ()))
    for name in names:
        option = next(p for p in command_context(name).command.params if flag in p.opts)
        assert isinstance(option, click.Option)
        assert "(default: " in (option.help or "") or name == "tune"
    values = said.values or get_args(kind.annotation)
    assert complete("estimate", "m", flag, "") == list(values)


def test_values_are_completed_by_what_they_are_of() -> None:
    models = [f"{library}:{name}" for library, spec in SPECS.items() for name in spec.published]
    gpus = [gpu.name for gpu in all_gpus()]
    assert complete("estimate", "") == models
    assert complete("estimate", "configs/t") == ["configs/t"]  # the shell's to complete
    assert complete("estimate", "m", "--gpu", "") == complete("gpus", "") == gpus
    assert complete("report", "m", "--gpu", "rtx-3090,rtx-409") == ["rtx-3090,rtx-4090"]
    assert complete("estimate", "m", "--precision", "fp32,b") == ["fp32,bf16"]
    assert "nvlink-a100" in complete("advise", "m", "--link", "")
    assert complete("advise", "m", "--keep", "l")[:2] == ["learning-rate", "loss"]
    assert complete("emit", "run", "--for", "") == list(TARGETS)
    assert complete("estimate", "m", "--set", "ema=t") == ["ema=true"]
