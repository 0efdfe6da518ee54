"""Plotly figures in the page's colours, and text that plotly shows as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.errors import PlannerError, printable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Okabe and Ito's palette, told apart with every common colour blindness and on light and dark
# alike; its black is left out.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILION, PURPLE, YELLOW, GREY = "#D55E00", "#CC79A7", "#F0E442", "#999999"
CYCLE = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, YELLOW, GREY)

# A legend above the drawing. Its empty title is a line for the buttons that appear at the right.
LEGEND_ABOVE = {
    "orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal",
    "maxheight": 0.8, "title": {"text": " ", "side": "top", "font": {"size": 18}},
}  # fmt: skip


def text_colour(ground: str) -> str:
    """Black or white, whichever has more contrast on `#rrggbb` (WCAG 2.2, relative luminance)."""
    shares = (int(ground[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


# A longer label would leave no room for what it is of.
MAX_LABEL = 300


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
    return Figure(traces, {"margin": margin, "colorway": CYCLE, "template": "none", **layout})
