"""How commands print: their answer on standard output, and how far they are on standard error."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from planner.core.errors import printable
from planner.core.files import to_json
from planner.core.terminal import has_live_terminal

if TYPE_CHECKING:
    from rich.text import Text

    from planner.cli.options import Json
    from planner.report.page.contents import Part
    from search.loop.prober import Progress

YES, MAYBE = ("Fits", "Recommended"), ("Fits for", "Probably fits")
NO = ("Probably does not", "Does not fit", "Nothing fits", "Probably nothing")
WAY_OUT, ENDING = "Ctrl-C ends with the best so far", "ending: what was measured is kept"
ECHO = 4  # columns for the ^C that a terminal echoes: where it wraps, rich erases a row too few


def tell(text: str) -> None:
    """A line on standard error, which names and messages of others cannot steer."""
    click.echo(printable(text), err=True)


def say(text: str = "") -> None:
    """Lines for a person, no wider than the terminal; names and messages of others cannot steer it
    by them. Their first is bold on a terminal, and coloured where it is a verdict."""
    from planner.report.text import fit_to_terminal

    bare = text.lstrip("\n")
    first, newline, rest = fit_to_terminal(printable(bare)).partition("\n")
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
    """A search's progress: a line when a probe begins and one when it has ended. Where it `is_live`
    the start stays below them while its probe runs, with what its worker is at and how long it has
    been at it."""

    def __init__(self, quiet: bool = False, is_live: bool = False) -> None:
        self.quiet, self.is_live = quiet, is_live
        self.begun, self.doing, self.at = "", "preparing", time.monotonic()

    def hear(self, progress: Progress) -> None:
        """A search has come further."""
        from search.loop.prober import progress_line

        line = progress_line(progress)
        if progress.kind == "step":
            self.doing = progress.phase + f": {progress.num_steps} steps" * bool(progress.num_steps)
        elif progress.kind == "start":
            self.begun, self.doing, self.at = line, "start", time.monotonic()
        elif progress.kind == "end":
            self.begun, self.doing, self.at = "", "choosing the next probe", time.monotonic()
        if line and not self.quiet and not (self.is_live and progress.kind == "start"):
            with suppress(OSError):  # who cannot read it (a full disk) has the results in files
                tell(line)

    def drawn(self, width: int) -> Text:
        """What runs, on two lines of at most `width` columns: never markup, nothing that steers."""
        from rich.text import Text

        from search.loop.prober import is_ending

        what, *rest = self.begun.split(" · ")
        passed, way_out = f"{time.monotonic() - self.at:.0f} s", ENDING if is_ending() else WAY_OUT
        lines = [what, " · ".join((self.doing, passed, *rest, way_out))]
        texts = [Text(printable(" ".join(line.split())), no_wrap=True) for line in lines if line]
        for text in texts:
            text.truncate(width, overflow="ellipsis")
        return Text("\n").join(texts)


@contextmanager
def show_on(quiet: bool = False) -> Iterator[Show]:
    """What shows a search's progress. Where a person watches, rich draws what runs, and erases it;
    standard output is left alone, and what others print on standard error are lines above."""
    show = Show(quiet, not quiet and has_live_terminal(os.environ))
    if not show.is_live:
        yield show
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    live = Live(
        get_renderable=lambda: show.drawn(console.width - ECHO), console=console, transient=True,
        redirect_stdout=False,
    )  # fmt: skip
    with suppress(OSError):
        live.start(refresh=True)
        console.show_cursor()  # a shell wants it back where Ctrl-Z stops this
    try:
        yield show
    finally:
        with suppress(OSError):  # a terminal that is gone needs it erased no more
            sys.stderr.flush()  # half a line of others', which would come after all that follows
            live.stop()
