"""Writes docs/reference.md anew: what --help shows of each command.

python -m tests.reference
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from planner.cli import cli
from planner.cli.help import find_command

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


def reference() -> str:
    return HEAD + "".join(_pages(planner_context()))


def _pages(found: click.Context) -> Iterator[str]:
    """The page of a command, then those of its subcommands."""
    yield f"\n## {found.command_path}\n\n```text\n{found.get_help()}\n```\n"
    if isinstance(found.command, click.Group):
        for name in found.command.list_commands(found):
            yield from _pages(find_command(found, (name,)))


if __name__ == "__main__":
    REFERENCE.write_text(reference(), encoding="utf-8")
