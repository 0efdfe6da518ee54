"""The live table of a search, for rich to draw: a status in, a panel out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from planner.core.errors import printable
from planner.core.units import format_seconds
from search.report.status import NUM_ENDED, Ended, Status

_OTHER_ROWS = 8  # of a terminal: the frame, the state, a rule, and a line above the table
_ECHO = 4  # columns for the ^C that a terminal echoes: where it wraps, rich erases a row too few


def live_table(status: Status, now: float, width: int, height: int) -> Panel:
    """The table at `now`, with room for as many ended ones as a terminal of that size has: all
    frames are equally high, as rich erases one by the height of the one that it drew before."""
    room = min(height - _OTHER_ROWS, NUM_ENDED)
    parts: list[RenderableType] = [_state(status, now)]
    if room > 0:
        parts += [Rule(style="dim"), _ended(status.ended[::-1][:room], room)]
    return Panel(
        Group(*parts), title=_text(status.heading, "bold"), title_align="left",
        subtitle=_text(status.way_out, "dim"), subtitle_align="left", border_style="dim",
        width=width - _ECHO,
    )  # fmt: skip


def _state(status: Status, now: float) -> Table:
    """What runs, what it is at, the best so far and how far all of it is: a line each."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True)
    grid.add_row("now", _text(_now(status), "bold"))
    grid.add_row("", _text(_doing(status, now)))
    grid.add_row("best", _text(_best(status.best), "green" if status.best else "dim"))
    grid.add_row("done", _text(_done(status, now)))
    return grid


def _now(status: Status) -> str:
    if not status.title:
        return "between two" if status.ended else "preparing"
    of = f" of {status.num_all}" if status.num_all else ""
    phase = f" [{status.phase}]" if status.phase else ""
    return f"{status.noun} {status.number}{of}{phase}: {status.title}"


def _doing(status: Status, now: float) -> str:
    parts = [status.doing] if status.doing else []
    if status.begun_at is not None:
        elapsed = _whole_seconds(now - status.begun_at)
        limit = status.deadline_seconds
        parts.append(elapsed if limit is None else f"{elapsed} of {_whole_seconds(limit)} at most")
    return " · ".join(parts)


def _best(best: Ended | None) -> str:
    if best is None:
        return "nothing yet"
    return f"{', '.join(filter(None, (best.found, best.memory)))}: {best.title}"


def _done(status: Status, now: float) -> str:
    of = f" of {status.num_all}" if status.num_all else ""
    plural = "" if status.num_done == 1 and not of else "s"
    parts = [f"{status.num_done}{of} {status.noun}{plural}"]
    if status.ends_at is not None:
        parts.append(f"{_whole_seconds(status.ends_at - now)} left")
    return " · ".join(parts)


def _ended(shown: Sequence[Ended], num_rows: int) -> Table:
    """The last ones, the latest first. What all of them have in common is left out."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True)
    for ended, title in zip(shown, _told_apart([e.title for e in shown]), strict=True):
        found = _text(ended.found, "" if ended.is_good else "red")
        table.add_row(str(ended.number), found, _text(ended.memory), _text(title))
    for _ in range(num_rows - len(shown)):
        table.add_row(" ")
    return table


def _told_apart(titles: Sequence[str]) -> list[str]:
    """Each without the parts that all of them have, but its first: there they are alike."""
    parts = [title.split(", ") for title in titles]
    if len(parts) < 2:
        return list(titles)
    common = set(parts[0]).intersection(*parts[1:])
    return [", ".join([own[0], *(p for p in own[1:] if p not in common)]) for own in parts]


def _whole_seconds(seconds: float) -> str:
    """Without the decimals that format_seconds has: a clock that ticks."""
    whole = int(max(seconds, 0.0))
    return f"{whole} s" if whole < 60 else format_seconds(whole)


def _text(text: str, style: str = "") -> Text:
    """On one line and as it is: never markup, its control characters escaped."""
    return Text(printable(" ".join(text.split())), style=style)
