"""What was foretold against what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

from planner.report.page.contents import Chart
from planner.report.page.plotting import GREY, LEGEND_ABOVE, new_figure, plot_text

MOST_TOLD = 10  # times its lower end: an interval that is wider tells nothing, by our judgement


@dataclass(frozen=True)
class Point:
    """One figure that was foretold and found, of the `number`-th probe. `kind` groups points by
    colour; `low` and `high` are the interval of what was foretold, where there is one. The axes are
    logarithmic: see `can_be_drawn`."""

    number: int
    title: str
    kind: str
    foretold: float
    found: float
    low: float | None = None
    high: float | None = None


def can_be_drawn(*figures: float) -> bool:
    """Whether all may stand on a logarithmic axis: no file of ours holds others."""
    return all(1e-15 < figure < 1e30 for figure in figures)


@dataclass(frozen=True)
class Words:
    """How a chart speaks of its points: `foretold` (expected, predicted), `of` what, its `unit`."""

    foretold: str
    of: str
    unit: str


def coverage(points: Sequence[Point], words: Words) -> str:
    """How many were found in their interval, and by how much half of them were off."""
    told = [p for p in points if p.low and p.high and p.high <= MOST_TOLD * p.low]
    within = sum(bool(p.low and p.high and p.low <= p.found <= p.high) for p in told)
    off = exp(median(abs(log(p.found) - log(p.foretold)) for p in points)) - 1
    return (
        f"{within:,} of {len(told):,} probes found a {words.of} within the interval that should "
        f"hold 95% of them{_untold(len(points) - len(told))}. Half of all were off by no more than "
        f"{off:.1%}."
    )


def _untold(number: int) -> str:
    """Those whose interval would hold whatever was found."""
    return f"; of {number} more the search knew too little to say" if number else ""


def diagonal(key: str, points: Sequence[Point], words: Words) -> Chart:
    """Foretold from left to right, found from bottom to top; on the line both are the same."""
    from plotly.graph_objects import Scatter

    ends = [pick(v for p in points for v in (p.foretold, p.found)) for pick in (min, max)]
    line = Scatter(
        x=ends, y=ends, mode="lines", hoverinfo="skip", showlegend=False,
        line={"color": GREY, "dash": "dash"},
    )  # fmt: skip
    traces = [line]
    for kind in dict.fromkeys(p.kind for p in points):
        own = [p for p in points if p.kind == kind]
        traces.append(
            Scatter(
                name=plot_text(kind), x=[p.foretold for p in own], y=[p.found for p in own],
                mode="markers", marker={"size": 9}, hoverinfo="text",
                hovertext=[_hover(p, words) for p in own],
            )
        )  # fmt: skip
    unit = plot_text(words.unit)
    figure = new_figure(
        traces,
        xaxis={"type": "log", "title": {"text": f"{words.of} {words.foretold}, {unit}"}},
        yaxis={"type": "log", "title": {"text": f"{words.of} found, {unit}"}},
        legend=LEGEND_ABOVE,
    )
    said = (
        f"{words.of.capitalize()} {words.foretold} against found: above the dashed line more was "
        f"found than {words.foretold}. Both axes are logarithmic."
    )
    return Chart(key, figure, said, 440)


def _hover(point: Point, words: Words) -> str:
    between = f" ({point.low:,.4g} to {point.high:,.4g})" if point.low and point.high else ""
    unit = plot_text(words.unit)
    return (
        f"probe {point.number}: {plot_text(point.title)}<br>"
        f"{words.foretold} {point.foretold:,.4g}{between} {unit}<br>"
        f"found {point.found:,.4g} {unit}, {point.found / point.foretold - 1:+.1%}"
    )
