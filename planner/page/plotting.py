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
