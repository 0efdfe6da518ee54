"""Writes docs/reference.md anew: what --help shows of each command.

python -m tests.reference
"""

from __future__ import annotations

from pathlib import Path

import click

from planner.cli import COMMANDS, cli

REFERENCE = Path(__file__).parents[1] / "docs/reference.md"
HEAD = """\
# The reference of the commands

Written by `python -m tests.reference` from the commands themselves. [commands.md](commands.md) is the guide.

Exit status:

- 0: done
- 1: it could not be done, or the answer is no (nothing fits, something must be fixed)
- 2: the command line is wrong
- 130, 143, 129: interrupted by Ctrl-C, SIGTERM or SIGHUP
- 141: the reader of standard output has left
"""  # noqa: E501


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


def reference() -> str:
    found = [planner_context(), *map(command_context, COMMANDS)]
    pages = (f"\n## {one.command_path}\n\n```text\n{one.get_help()}\n```\n" for one in found)
    return HEAD + "".join(pages)


if __name__ == "__main__":
    REFERENCE.write_text(reference(), encoding="utf-8")
