"""How a table is laid out: which of its rows are elements of the page, and which lie packed; and a
chart's figures as a table, for keyboards, screen readers, and where no script runs."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.core.errors import printable
from planner.report.page.contents import Cell, Chart, Number, Table, Verdict

# A table of more rows has a box of its own to scroll in, and a filter.
TALL_ROWS = 15
# A longer table's first PAGE_ROWS are in the page (assets/tables.js has the same number), and all
# of them packed: 5,000 rows of 12 cells as elements took Chromium most of two seconds.
LONG_ROWS, PAGE_ROWS = 300, 100


@dataclass(frozen=True)
class LaidOut:
    """A table as the template needs it. `key` is its anchor; `rows` are elements."""

    key: str
    rows: Sequence[Sequence[Cell]]
    numeric: Sequence[bool]
    tall: bool
    packed: bool
    counted: str


@dataclass
class Tables:
    """The tables of a page in order, and the packed rows of the long ones: ([cell, …], marked),
    where a cell is a text or (value, text)."""

    rows: dict[str, list[Any]] = field(default_factory=dict)
    count: int = 0

    def lay_out(self, table: Table) -> LaidOut:
        self.count += 1
        key = f"table-{self.count}"
        total = len(table.rows)
        long = total > LONG_ROWS
        counted = f"{total:,} rows"
        if long:
            marked = set(table.marked)
            self.rows[key] = [
                [[_packed(cell) for cell in row], int(index in marked)]
                for index, row in enumerate(table.rows)
            ]
            counted = f"Rows 1–{PAGE_ROWS} · {counted}"
        return LaidOut(
            key=key,
            rows=table.rows[:PAGE_ROWS] if long else table.rows,
            numeric=numeric_columns(table),
            tall=total > TALL_ROWS,
            packed=long,
            counted=counted,
        )


def numeric_columns(table: Table) -> list[bool]:
    """Which columns hold numbers."""
    return [
        any(is_number(row[column]) for row in table.rows) for column in range(len(table.headers))
    ]


def is_number(cell: Cell) -> bool:
    return isinstance(cell, Number)


def is_verdict(cell: Cell) -> bool:
    return isinstance(cell, Verdict)


def read(cell: Cell) -> str:
    """What a cell reads as."""
    if isinstance(cell, Verdict):
        return f"{cell.icon} {cell.word}"
    if isinstance(cell, Number):
        return printable(cell.text) or "-"
    return printable(cell)


def sorted_by(cell: Cell) -> str:
    """What a cell sorts by, as an attribute; "" for text and for a number that is not known."""
    value = _known(cell)
    return "" if value is None else repr(value)


def _known(cell: Cell) -> float | None:
    """The number of a cell. None where it is not finite: JSON has no other word for it."""
    known = isinstance(cell, Number) and cell.value is not None and math.isfinite(cell.value)
    return cell.value if isinstance(cell, Number) and known else None


def _packed(cell: Cell) -> Any:
    return (_known(cell), read(cell)) if is_number(cell) else read(cell)


def figures_of(chart: Chart) -> Table:
    """The chart's own table; else a row for each category of its bars, or for each point."""
    if chart.table is not None:
        return chart.table
    layout, traces = chart.figure.layout, list(chart.figure.data)
    bars = [trace for trace in traces if trace.type == "bar"]
    if bars and bars == traces and len({trace.xaxis for trace in bars}) == 1:
        return _of_bars(bars, chart.description)
    rows = [row for trace in traces for row in _points(trace)]
    names = [_title(layout[axis]) or axis[0] for axis in ("xaxis", "yaxis")]
    return Table(["", *names], rows, chart.description).filled()


def _of_bars(bars: list[Any], said: str) -> Table:
    """A column for each trace."""
    lying = bars[0].orientation == "h"
    names, values = ("y", "x") if lying else ("x", "y")
    found = {
        (str(name), trace.name): value
        for trace in bars
        for number, value in enumerate(trace[values])
        for name in [number if trace[names] is None else trace[names][number]]
    }
    categories = list(dict.fromkeys(name for name, _ in found))
    rows = [
        [_figure(name), *(_figure(found.get((name, t.name))) for t in bars)] for name in categories
    ]
    return Table(["", *(_plain(trace.name or "value") for trace in bars)], rows, said)


def _points(trace: Any) -> Iterator[list[Cell]]:
    """None of what is only drawn, as a line that leads the eye."""
    if trace.x is None or trace.hoverinfo == "skip":
        return
    for x, y in zip(trace.x, trace.y, strict=False):
        if x is not None and y is not None:
            yield [_plain(trace.name or ""), _figure(x), _figure(y)]


def _figure(value: Any) -> Cell:
    """Numbers to four digits, as a reader compares them."""
    if value is None:
        return Number(None, "-")
    try:
        number = float(value)
    except ValueError:
        return _plain(str(value))
    return Number(number, f"{number:,.4g}" if abs(number) < 1e4 else f"{number:,.0f}")


def _title(axis: Any) -> str:
    return _plain(axis.title.text or "")


def _plain(text: str) -> str:
    """What `plot_text` made of a text, as it was."""
    return html.unescape(text.replace("<br>", " "))
