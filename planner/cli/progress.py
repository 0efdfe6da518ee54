"""How a search shows on standard error that it goes on."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from planner.errors import printable
from planner.report.recommendation import describe_progress
from planner.units import format_seconds

if TYPE_CHECKING:
    from search.progress import Progress


Describe = Callable[[Any], str]


def make_progress(describe: Describe = describe_progress) -> LiveLine | PlainLines:
    """A line that lives on a terminal, plain lines elsewhere; `describe` says what one shows."""
    return LiveLine(describe) if sys.stderr.isatty() else PlainLines(describe)


class PlainLines:
    """Progress where nobody watches: a line when a probe begins or ends."""

    def __init__(self, describe: Describe = describe_progress) -> None:
        self.describe = describe

    def __call__(self, progress: Progress[Any, Any]) -> None:
        line = self.describe(progress)
        if line:
            _say(line)

    def close(self) -> None:
        return None


class LiveLine:
    """Progress on a terminal: ended probes as lines, and one line that lives."""

    def __init__(self, describe: Describe = describe_progress) -> None:
        self.describe = describe
        self.current: Progress[Any, Any] | None = None
        self.width = 0

    def __call__(self, progress: Progress[Any, Any]) -> None:
        if progress.kind == "start":
            self.current = progress
        elif progress.kind == "end":
            self._erase()
            _say(self.describe(progress))
            self.current = None
        elif progress.kind == "note":
            self._erase()
            _say(progress.text)
        if self.current is not None:
            self._draw(self.current, progress)

    def _draw(self, current: Progress[Any, Any], progress: Progress[Any, Any]) -> None:
        doing = progress.text if progress.kind == "step" else "start"
        if progress.step_seconds:
            doing += f" {format_seconds(progress.step_seconds)} a step"
        columns = shutil.get_terminal_size().columns
        line = f"{self.describe(current)} · {doing}"[: columns - 1]
        _say(line.ljust(self.width), before="\r", after="")
        self.width = len(line)

    def _erase(self) -> None:
        if self.width:
            _say(" " * self.width, before="\r", after="\r")
        self.width = 0

    def close(self) -> None:
        self._erase()


def _say(text: str, before: str = "", after: str = "\n") -> None:
    """Progress that nobody can read (a closed terminal, a full disk) does not end the search: its
    results are in files."""
    with suppress(OSError):
        click.echo(f"{before}{printable(text)}{after}", nl=False, err=True)
