"""Plotly figures in the page's colours, and text that plotly shows as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from planner.core.errors import PlannerError, printable
from planner.report.page.contents import Cell, Chart, Number, Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# The hues of Okabe and Ito's palette, which people with any common colour blindness tell apart, in
# such lightness that each has a contrast of 3 with the page's backgrounds, light and dark (WCAG
# 2.2, 1.4.11): their own sky, orange, purple and yellow are too light for white paper.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#2E97D1", "#008A62", "#C27A00"
VERMILION, PURPLE, YELLOW, GREY = "#C8401A", "#B65C92", "#8F8300", "#808080"
STEEL, LIMIT = "#6B7B8B", "#D62728"  # bars of one kind; a memory limit
CYCLE = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, YELLOW, GREY)

# A legend above the drawing. Its empty title is a line for the buttons that appear at the right.
LEGEND_ABOVE = {
    "orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal",
    "maxheight": 0.8, "title": {"text": " ", "side": "top", "font": {"size": 18}},
}  # fmt: skip
MAX_LABEL = 300  # characters: a longer label would leave no room for the drawing
_BAR_PX, _AROUND_PX = 30, 70


def plot_text(text: str) -> str:
    """`text` for a label of plotly, which would read some HTML in it (`<b>`, `<a>`). Control
    characters become escapes. A text of more than MAX_LABEL characters is cut."""
    shown = printable(text)
    if len(shown) > MAX_LABEL:
        shown = shown[: MAX_LABEL - 1] + "…"
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def new_figure(traces: list[Any], **layout: Any) -> Figure:
    """A figure without its own colours for paper, text and lines: the page's theme sets those.
    Raises PlannerError where plotly is missing."""
    try:
        from plotly.graph_objects import Figure
    except ImportError:
        raise PlannerError(
            "a report needs plotly, which is not installed.", "pip install plotly"
        ) from None
    margin = {"l": 8, "r": 8, "t": 8, "b": 8}
    look = {"margin": margin, "colorway": CYCLE, "template": "none", "legend": LEGEND_ABOVE}
    return Figure(traces, {**look, **layout})


def bar_chart(
    key: str,
    description: str,
    values: Mapping[str, float],
    unit: str,
    ranges: Sequence[tuple[float, float] | None] = (),
    limits: Sequence[float | None] = (),
) -> Chart:
    """A horizontal bar for each name, the first on top, with the range of its value and its
    limit."""
    names, numbers = list(map(plot_text, values)), list(values.values())
    ends = [interval or (value, value) for value, interval in zip(numbers, ranges, strict=False)]
    bar: dict[str, Any] = {
        "type": "bar", "orientation": "h", "y": names, "x": numbers, "name": "needed",
        "marker": {"color": STEEL}, "hovertemplate": "%{y}: %{x:,.4g}<extra></extra>",
        "error_x": {
            "type": "data", "symmetric": False, "color": GREY,
            "array": [high - value for value, (_, high) in zip(numbers, ends, strict=False)],
            "arrayminus": [value - low for value, (low, _) in zip(numbers, ends, strict=False)],
        },
    }  # fmt: skip
    limit = {
        "type": "scatter", "mode": "markers", "name": "the card has", "y": names, "x": [*limits],
        "marker": {"symbol": "line-ns-open", "size": 18, "color": LIMIT, "line": {"width": 3}},
    }  # fmt: skip
    figure = new_figure(
        [bar, *([limit] if any(limits) else [])], showlegend=any(limits),
        xaxis={"title": {"text": plot_text(unit)}, "rangemode": "tozero"},
        yaxis={"type": "category", "range": [len(names) - 0.5, -0.5], "dtick": 1,
               "ticklabelstandoff": 6},
    )  # fmt: skip
    rows: list[list[Cell]] = [
        [name, Number(n, f"{n:,.4g}" if abs(n) < 1e4 else f"{n:,.0f}")]
        for name, n in values.items()
    ]
    height = _AROUND_PX + _BAR_PX * len(names) + (60 if any(limits) else 0)
    return Chart(key, figure, description, height, table=Table(["", unit], rows))
