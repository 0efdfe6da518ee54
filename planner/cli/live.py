"""A live table on the terminal of standard error, which rich draws and erases."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.text import Text

from planner.cli.progress import WAY_OUT, Show
from planner.core.errors import printable
from search.loop.interrupts import is_ending
from search.runs.live import live_panel

ENDING = "ending: what was measured is kept"


class LiveTable(Show):
    """Ended probes as lines that scroll away, and under them the table. Standard output is left
    alone; what others print on standard error are lines too."""

    def __init__(self, heading: str = "", way_out: str = WAY_OUT) -> None:
        super().__init__(heading, way_out)
        self.console = Console(stderr=True)
        self.live = Live(self, console=self.console, transient=True, redirect_stdout=False)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        drawn = replace(self.status, way_out=ENDING) if is_ending() else self.status
        yield live_panel(drawn, time.monotonic(), console.width)

    def __enter__(self) -> Self:
        with suppress(OSError):
            self.live.start(refresh=True)
            self.console.show_cursor()  # a shell wants it back where Ctrl-Z stops this
        return self

    def __exit__(self, *_: object) -> None:
        """Erases the table; a terminal that is gone needs that no more."""
        with suppress(OSError):
            sys.stderr.flush()  # half a line of others', which would come after all that follows
            self.live.stop()

    def say(self, line: str) -> None:
        """A line in place of the table, which moves down; the search goes on where nobody sees."""
        with suppress(OSError):
            self.console.print(Text(printable(line)))
