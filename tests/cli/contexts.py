"""The contexts in which the commands run, as `--help` sees them."""

from __future__ import annotations

import click

from planner.cli import cli


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
