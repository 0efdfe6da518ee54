"""A chart's figures as a table: for keyboards, screen readers, and where no script runs."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from planner.report.page.contents import Cell, Chart, Number, Table


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
    rows = [[_cell(name), *(_cell(found.get((name, t.name))) for t in bars)] for name in categories]
    return Table(["", *(_plain(trace.name or "value") for trace in bars)], rows, said)


def _points(trace: Any) -> Iterator[list[Cell]]:
    """None of what is only drawn, as a line that leads the eye."""
    if trace.x is None or trace.hoverinfo == "skip":
        return
    for x, y in zip(trace.x, trace.y, strict=False):
        if x is not None and y is not None:
            yield [_plain(trace.name or ""), _cell(x), _cell(y)]


def _cell(value: Any) -> Cell:
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
