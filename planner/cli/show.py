"""How commands print: their answer on standard output, and how far they are on standard error."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from planner.core.errors import printable
from planner.core.files import to_json
from planner.core.terminal import has_live_terminal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from planner.cli.options import Json
    from planner.report.page.contents import Part
    from search.loop.prober import Progress

YES, MAYBE = ("Fits", "Recommended"), ("Fits for", "Probably fits")
NO = ("Probably does not", "Does not fit", "Nothing fits", "Probably nothing")
WAY_OUT, ENDING = "Ctrl-C ends with the best so far", "ending: what was measured is kept"


def tell(text: str) -> None:
    """A line on standard error, which names and messages of others cannot steer."""
    click.echo(printable(text), err=True)


def say(text: str = "") -> None:
    """Lines for a person, no wider than the terminal; names and messages of others cannot steer it
    by them. Their first is bold on a terminal, and coloured where it is a verdict."""
    from planner.report.text import fitted

    bare = text.lstrip("\n")
    first, newline, rest = fitted(printable(bare)).partition("\n")
    plain = {"NO_COLOR", "CI"} & {n for n, v in os.environ.items() if v}
    if newline and sys.stdout.isatty() and not plain and os.environ.get("TERM", "dumb") != "dumb":
        of_verdicts = {MAYBE: "yellow", YES: "green", NO: "red"}.items()
        colour = next((c for words, c in of_verdicts if first.startswith(words)), None)
        first = click.style(first, bold=True, fg=colour)
    click.echo(f"{text.removesuffix(bare)}{first}{newline}{rest}")


def answer(request: Json, data: Any, shown: Callable[[], str | Sequence[Part]]) -> None:
    """An answer as it was asked for: `data`, or what it returns, as JSON, or what is `shown`."""
    if request.as_json:
        click.echo(json.dumps(to_json(data() if callable(data) else data), indent=2))
        return
    from planner.report.text import parts_text

    said = shown()
    say(said if isinstance(said, str) else parts_text(said, getattr(request, "detail", False)))


class Show:
    """Keeps where a search stands; unless quiet, says a line when a probe begins or ends."""

    says_starts = True

    def __init__(self, heading: str = "", quiet: bool = False) -> None:
        from search.runs import Status

        self.status, self.quiet = Status(heading=heading, way_out=WAY_OUT), quiet

    def hear(self, progress: Progress) -> None:
        """A search has come further."""
        from search.loop.prober import progress_line
        from search.runs import after

        line = progress_line(progress)
        if line and (progress.kind != "start" or self.says_starts):
            self.say(line)
        self.status = after(self.status, progress, time.monotonic())

    def say(self, line: str) -> None:
        """What nobody can read (a closed terminal, a full disk) does not end the search: its
        results are in files."""
        with suppress(OSError):
            if not self.quiet:
                tell(line)


class LiveTable(Show):
    """Ended probes as lines that scroll away, and under them a table, which rich draws and erases.
    Standard output is left alone; what others print on standard error are lines too."""

    says_starts = False

    def __init__(self, heading: str = "") -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(heading)
        self.console = Console(stderr=True)
        self.live = Live(self, console=self.console, transient=True, redirect_stdout=False)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        from search.loop.prober import is_ending
        from search.runs import live_panel

        drawn = replace(self.status, way_out=ENDING) if is_ending() else self.status
        yield live_panel(drawn, time.monotonic(), console.width)

    def say(self, line: str) -> None:
        """A line in place of the table, which moves down; the search goes on where nobody sees."""
        from rich.text import Text

        with suppress(OSError):
            self.console.print(Text(printable(line)))


@contextmanager
def show_on(heading: str, quiet: bool = False) -> Iterator[Show]:
    """What shows a search's progress: a live table where a person watches, else lines."""
    if quiet or not has_live_terminal(os.environ):
        yield Show(heading, quiet)
        return
    table = LiveTable(heading)
    with suppress(OSError):
        table.live.start(refresh=True)
        table.console.show_cursor()  # a shell wants it back where Ctrl-Z stops this
    try:
        yield table
    finally:
        with suppress(OSError):  # a terminal that is gone needs it erased no more
            sys.stderr.flush()  # half a line of others', which would come after all that follows
            table.live.stop()
