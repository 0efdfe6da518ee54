"""Horizontal bars, the first on top: what several names have of one figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from planner.page.plotting import LEGEND_ABOVE, PURPLE, new_figure, plot_text
from planner.units import GIB, format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure, Scatter

FEW = 12  # bars, which have room for more height


def bars_figure(traces: Sequence[Any], title: str, names: Sequence[str]) -> Figure:
    """Stacked where they have one name; `title` is that of what they measure, `names` are those of
    the bars, from the top."""
    return new_figure(
        list(traces),
        barmode="stack",
        xaxis={"title": {"text": title}, "rangemode": "tozero"},
        yaxis={
            "type": "category", "categoryorder": "array", "dtick": 1, "ticklabelstandoff": 6,
            "categoryarray": [plot_text(name) for name in names],
            "range": [len(names) - 0.5, -0.5], "automargin": True,
        },
        legend=LEGEND_ABOVE,
        bargap=0.3,
    )  # fmt: skip


def bars_height(num_bars: int) -> int:
    """In pixels, with room for three rows of a legend; many bars lie closer together."""
    return 180 + (32 if num_bars <= FEW else 22) * num_bars


def limit_marks(names: Sequence[str], limits: Sequence[int | None], title: str) -> Scatter:
    """An upright mark on each bar whose limit, in bytes, is known, in GiB."""
    from plotly.graph_objects import Scatter

    known = [(name, limit) for name, limit in zip(names, limits, strict=True) if limit]
    return Scatter(
        name=title,
        y=[plot_text(name) for name, _ in known],
        x=[limit / GIB for _, limit in known],
        mode="markers",
        marker={
            "symbol": "line-ns-open", "size": 20 if len(names) <= FEW else 12, "color": PURPLE,
            "line": {"width": 3},
        },
        customdata=[format_bytes(limit) for _, limit in known],
        hovertemplate="%{y}<br>%{fullData.name}: %{customdata}<extra></extra>",
    )  # fmt: skip
