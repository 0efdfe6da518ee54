"""How commands print: their answer on standard output, their progress on standard error."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

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
ECHO = 4  # columns for the ^C that a terminal echoes: if a line wraps, rich erases too few rows


def tell(text: str) -> None:
    """Print a line on standard error. Control characters in it are escaped."""
    click.echo(printable(text), err=True)


def say(text: str = "") -> None:
    """Print lines for a person, no wider than the terminal, with control characters escaped. On a
    terminal the first line is bold, and coloured if it is a verdict."""
    from planner.report.text import fit_to_terminal

    body = text.lstrip("\n")
    first, newline, rest = fit_to_terminal(printable(body)).partition("\n")
    plain = {"NO_COLOR", "CI"} & {n for n, v in os.environ.items() if v}
    if newline and sys.stdout.isatty() and not plain and os.environ.get("TERM", "dumb") != "dumb":
        colours = {MAYBE: "yellow", YES: "green", NO: "red"}.items()
        colour = next((c for words, c in colours if first.startswith(words)), None)
        first = click.style(first, bold=True, fg=colour)
    click.echo(f"{text.removesuffix(body)}{first}{newline}{rest}")


def answer(request: Json, data: object, show: Callable[[], str | Sequence[Part]]) -> None:
    """Print an answer: with --json the `data` (or the result of calling it), else what `show`
    returns."""
    if request.as_json:
        click.echo(json.dumps(to_json(data() if callable(data) else data), indent=2))
        return
    from planner.report.text import parts_text

    parts = show()
    say(parts if isinstance(parts, str) else parts_text(parts, getattr(request, "detail", False)))


class Show:
    """The progress of a search: a line when a probe begins, and one when it has ended. If
    `is_live`, the first is drawn below them while the probe runs, with the phase of its worker and
    the time since it began."""

    def __init__(self, quiet: bool = False, is_live: bool = False) -> None:
        self.quiet, self.is_live = quiet, is_live
        self.start_line, self.phase, self.started = "", "preparing", time.monotonic()

    def update(self, progress: Progress) -> None:
        """Take note of a search's progress, and print a line for it."""
        from search.loop.prober import progress_line

        line = progress_line(progress)
        if progress.kind == "step":
            self.phase = progress.phase + f": {progress.num_steps} steps" * bool(progress.num_steps)
        elif progress.kind == "start":
            self.start_line, self.phase, self.started = line, "start", time.monotonic()
        elif progress.kind == "end":
            self.start_line, self.phase = "", "choosing the next probe"
            self.started = time.monotonic()
        if line and not self.quiet and not (self.is_live and progress.kind == "start"):
            with suppress(OSError):  # on a full disk nothing is lost: files have the results
                tell(line)

    def render(self, width: int) -> Text:
        """The running probe on two lines of at most `width` columns, without markup and with
        control characters escaped."""
        from rich.text import Text

        from search.loop.signals import is_ending

        title, *rest = self.start_line.split(" · ")
        elapsed = f"{time.monotonic() - self.started:.0f} s"
        way_out = ENDING if is_ending() else WAY_OUT
        lines = [title, " · ".join((self.phase, elapsed, *rest, way_out))]
        texts = [Text(printable(" ".join(line.split())), no_wrap=True) for line in lines if line]
        for text in texts:
            text.truncate(width, overflow="ellipsis")
        return Text("\n").join(texts)


@contextmanager
def show_on(quiet: bool = False) -> Iterator[Show]:
    """A context with the `Show` of a search. On a live terminal rich draws the running probe, and
    erases it at the end. Standard output stays untouched, and what others print on standard error
    appears as lines above."""
    show = Show(quiet, not quiet and has_live_terminal(os.environ))
    if not show.is_live:
        yield show
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    live = Live(
        get_renderable=lambda: show.render(console.width - ECHO), console=console, transient=True,
        redirect_stdout=False,
    )  # fmt: skip
    with suppress(OSError):
        live.start(refresh=True)
        console.show_cursor()  # or Ctrl-Z would leave the shell without a cursor
    try:
        yield show
    finally:
        with suppress(OSError):  # the terminal may be gone
            sys.stderr.flush()  # half a line of others must come before what follows
            live.stop()
