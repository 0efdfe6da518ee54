"""Plotly figures in the page's colours, and text that plotly shows as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from planner.core.errors import PlannerError, printable
from planner.report.page.contents import Cell, Chart, Number, Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# The hues of Okabe and Ito's palette, told apart with every common colour blindness, in such
# lightness that each has a contrast of 3 with the page's grounds, light and dark (WCAG 2.2,
# 1.4.11): their sky, orange, purple and yellow are too light for white paper.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#2E97D1", "#008A62", "#C27A00"
VERMILION, PURPLE, YELLOW, GREY = "#C8401A", "#B65C92", "#8F8300", "#808080"
STEEL, LIMIT = "#6B7B8B", "#D62728"  # bars of one kind; what there is of memory
CYCLE = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, YELLOW, GREY)

# A legend above the drawing. Its empty title is a line for the buttons that appear at the right.
LEGEND_ABOVE = {
    "orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal",
    "maxheight": 0.8, "title": {"text": " ", "side": "top", "font": {"size": 18}},
}  # fmt: skip
# A longer label would leave no room for what it is of.
MAX_LABEL = 300
_BAR_PX, _AROUND_PX = 30, 70


def luminance(colour: str) -> float:
    """The relative luminance of `#rrggbb`, as WCAG 2.2 defines it."""
    shares = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def plot_text(text: str) -> str:
    """`text` as plotly shows it letter by letter: it reads a part of HTML (`<b>`, `<a>`) in every
    label, and control characters are shown as escapes. A text of more than MAX_LABEL letters is
    cut."""
    shown = printable(text)
    if len(shown) > MAX_LABEL:
        shown = shown[: MAX_LABEL - 1] + "…"
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def new_figure(traces: list[Any], **layout: Any) -> Figure:
    """A figure without colours of its own for paper, text and lines: those are the theme's, which
    the page applies. Raises PlannerError where plotly is missing."""
    try:
        from plotly.graph_objects import Figure
    except ImportError:
        raise PlannerError(
            "a report needs plotly, which is not installed.", "pip install plotly"
        ) from None
    margin = {"l": 8, "r": 8, "t": 8, "b": 8}
    look = {"margin": margin, "colorway": CYCLE, "template": "none", "legend": LEGEND_ABOVE}
    return Figure(traces, {**look, **layout})


def bars(
    key: str,
    said: str,
    values: Mapping[str, float],
    unit: str,
    within: Sequence[tuple[float, float] | None] = (),
    limits: Sequence[float | None] = (),
) -> Chart:
    """A lying bar for each name, the first on top: where it may lie (`within`), and its limit."""
    names, numbers = list(map(plot_text, values)), list(values.values())
    ends = [found or (value, value) for value, found in zip(numbers, within, strict=False)]
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
    return Chart(key, figure, said, height, table=Table(["", unit], rows))
