"""The live table of a search, drawn with rich: a standing in, lines for a terminal out.

No line is wider, and no table taller, than was asked for; what a model or a message says is shown
as it is, never read as markup.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from planner.errors import printable
from planner.report.standing import Ended, Standing
from planner.units import format_seconds

WIDEST = 132  # columns: a line that is longer is hard to follow
_MEMORY_FROM, _LABELS_FROM = 72, 48  # columns, from which on there is room for these
_FRAME_ROWS, _STATE_ROWS = 2, 4
_SIGNS, _ASCII_SIGNS = {True: "✓", False: "✗"}, {True: "+", False: "x"}


def live_lines(
    standing: Standing, now: float, width: int, height: int, encoding: str = "utf-8",
) -> list[str]:  # fmt: skip
    """The table at `now` as lines with a terminal's escapes for colour, as the environment asks
    for (NO_COLOR, TERM)."""
    width = max(2, min(width, WIDEST))
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, legacy_windows=False, emoji=False,
        markup=False, highlight=False,
    )  # fmt: skip
    with console.capture() as captured:
        console.print(live_table(standing, now, width, height, encoding))
    return captured.get().splitlines()[:height]


def live_table(
    standing: Standing, now: float, width: int, height: int, encoding: str = "utf-8"
) -> RenderableType:
    """The table as rich knows it, for lines of an encoding that may lack the signs of a frame."""
    words = _Words(encoding)
    if height < _FRAME_ROWS + _STATE_ROWS or width < 24:
        return _state(standing, now, words, width)
    parts: list[RenderableType] = [_state(standing, now, words, width)]
    room = height - _FRAME_ROWS - _STATE_ROWS
    shown = list(reversed(standing.ended))[: room if room < 4 else room - 1]
    if shown:
        if room >= 4:
            parts.append(Rule(style="dim", characters=words.rule))
        parts.append(_ended(shown, words, width))
    return Panel(
        Group(*parts), box=words.box, title=words.text(standing.heading, "bold"),
        title_align="left", subtitle=words.text(standing.way_out, "dim"), subtitle_align="left",
        border_style="dim", padding=(0, 1),
    )  # fmt: skip


def _state(standing: Standing, now: float, words: _Words, width: int) -> Table:
    """What runs, what it is at, the best so far and how far all of it is: a line each."""
    grid = Table.grid(padding=(0, 1), expand=True)
    if width >= _LABELS_FROM:
        grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True)
    rows = (
        ("now", words.text(_now(standing), "bold")),
        ("", words.text(_doing(standing, now))),
        ("best", words.text(_best(standing.best), "green" if standing.best else "dim")),
        ("done", words.text(_done(standing, now))),
    )
    for label, text in rows:
        grid.add_row(*([label, text] if width >= _LABELS_FROM else [text]))
    return grid


def _now(standing: Standing) -> str:
    if not standing.title:
        return "between two" if standing.ended else "preparing"
    of = f" of {standing.num_all}" if standing.num_all else ""
    phase = f" [{standing.phase}]" if standing.phase else ""
    return f"{standing.noun} {standing.number}{of}{phase}: {standing.title}"


def _doing(standing: Standing, now: float) -> str:
    parts = [standing.doing] if standing.doing else []
    if standing.begun_at is not None:
        elapsed = _whole_seconds(now - standing.begun_at)
        limit = standing.deadline_seconds
        parts.append(elapsed if limit is None else f"{elapsed} of {_whole_seconds(limit)} at most")
    return " · ".join(parts)


def _best(best: Ended | None) -> str:
    if best is None:
        return "nothing yet"
    return f"{', '.join(filter(None, (best.found, best.memory)))}: {best.title}"


def _done(standing: Standing, now: float) -> str:
    of = f" of {standing.num_all}" if standing.num_all else ""
    plural = "" if standing.num_done == 1 and not of else "s"
    parts = [f"{standing.num_done}{of} {standing.noun}{plural}"]
    if standing.ends_at is not None:
        parts.append(f"{_whole_seconds(standing.ends_at - now)} left")
    return " · ".join(parts)


def _ended(shown: Sequence[Ended], words: _Words, width: int) -> Table:
    """The last ones, the latest first. What all of them have in common is left out."""
    has_memory = width >= _MEMORY_FROM and any(e.memory for e in shown)
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    if has_memory:
        table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True)
    for ended, title in zip(shown, _told_apart([e.title for e in shown]), strict=True):
        found = f"{words.signs[ended.is_good]} {ended.found}"
        cells = [words.text(str(ended.number)), words.text(found, "" if ended.is_good else "red")]
        cells += [words.text(ended.memory)] if has_memory else []
        table.add_row(*cells, words.text(title))
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


class _Words:
    """Text as an encoding has it: control characters escaped, on one line."""

    def __init__(self, encoding: str) -> None:
        self.encoding = encoding
        self.is_plain = not encoding.lower().replace("-", "").startswith("utf8")
        self.box = box.ASCII2 if self.is_plain else box.ROUNDED
        self.rule = "-" if self.is_plain else "─"
        self.signs = _ASCII_SIGNS if self.is_plain else _SIGNS

    def text(self, text: str, style: str = "") -> Text:
        line = printable(" ".join(text.split()))
        if self.is_plain:
            line = line.replace("·", "-").replace("×", "x")
            line = line.encode(self.encoding, "backslashreplace").decode(self.encoding)
        return Text(
            line, style=style, no_wrap=True, overflow="crop" if self.is_plain else "ellipsis"
        )
