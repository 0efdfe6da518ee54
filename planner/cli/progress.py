"""How a search shows on standard error that it goes on: a live table where a person watches, plain
lines elsewhere, nothing where nothing was asked for."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

import click

from planner.core.errors import printable
from planner.core.terminal import has_live_terminal
from search.loop.progress_text import progress_line
from search.runs.live import Status, after

if TYPE_CHECKING:
    from search.loop.progress import Progress

WAY_OUT = "Ctrl-C ends with the best so far"

quiet_flag = click.option(
    "--quiet", "-q", is_flag=True, help="Show no progress: only the result, warnings and errors."
)


def show_on(heading: str, quiet: bool = False, way_out: str = WAY_OUT) -> Show:
    """What shows a command's progress until it is left as a context."""
    if quiet:
        return Show(heading, way_out)
    if not has_live_terminal(os.environ):
        return PlainLines(heading, way_out)
    from planner.cli.live import LiveTable

    return LiveTable(heading, way_out)


class Show:
    """Shows nothing, and keeps where the search stands. The others say and draw it."""

    says_starts = False  # whether a probe's start is a line too

    def __init__(self, heading: str = "", way_out: str = WAY_OUT) -> None:
        self.status = Status(heading=heading, way_out=way_out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def hear(self, progress: Progress) -> None:
        """A search has come further."""
        line = progress_line(progress)
        if line and (progress.kind != "start" or self.says_starts):
            self.say(line)
        self.show_status(after(self.status, progress, time.monotonic()))

    def say(self, line: str) -> None:
        """A line that stays."""

    def show_status(self, status: Status) -> None:
        """It now stands so."""
        self.status = status


class PlainLines(Show):
    """Where nobody watches: a line when a probe begins or ends."""

    says_starts = True

    def say(self, line: str) -> None:
        """What nobody can read (a closed terminal, a full disk) does not end the search: its
        results are in files."""
        with suppress(OSError):
            click.echo(printable(line), err=True)
