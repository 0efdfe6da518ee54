"""Charts of what was foretold against what was found: on a diagonal, and one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, floor, log
from statistics import median
from typing import TYPE_CHECKING, Any

from planner.page.contents import Chart
from planner.page.plotting import CYCLE, GREY, LEGEND_ABOVE, new_figure, plot_text

if TYPE_CHECKING:
    from plotly.graph_objects import Scatter

SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "cross", "star", "hexagon")
# Ticks of an axis of ratios, which is logarithmic: found twice as high is as far off as half.
RATIO_TICKS = (  # up to which ratio, and where its ticks are
    (1.2, (0.9, 0.95, 1.0, 1.05, 1.1)),
    (1.8, (0.6, 0.75, 0.9, 1.0, 1.1, 1.33, 1.67)),
    (4.0, (0.33, 0.5, 0.75, 1.0, 1.33, 2.0, 3.0)),
    (30.0, (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)),
    (float("inf"), (1e-6, 1e-4, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0, 1e4, 1e6)),
)
# Of one decade, that an axis of figures may have ticks at: the fewest that are enough are taken.
STEPS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
MOST_INTERVALS = 300  # of more points they would be one grey field
NARROWEST = 1.12  # of an axis of ratios: errors of a percent should look small
# Of a chart that has no legend above it: room for the buttons that appear there.
BELOW_BUTTONS = {"l": 8, "r": 8, "t": 36, "b": 8}


@dataclass(frozen=True)
class Point:
    """One figure that was foretold and found, of the `number`-th probe. `kind` groups points by
    colour; `low` and `high` are the interval of what was foretold, where there is one."""

    number: int
    title: str
    kind: str
    foretold: float
    found: float
    low: float | None = None
    high: float | None = None

    @property
    def ratio(self) -> float:
        """Found over foretold."""
        return self.found / self.foretold

    @property
    def is_within(self) -> bool | None:
        """Whether it was found in its interval."""
        if self.low is None or self.high is None:
            return None
        return self.low <= self.found <= self.high


@dataclass(frozen=True)
class Words:
    """How a chart speaks of its points: `foretold` (expected, predicted), `of` what, its `unit`."""

    foretold: str
    of: str
    unit: str


def typical_ratio(points: Sequence[Point]) -> float:
    """By how much points are off, either way: the median, as a factor of 1 or more."""
    return exp(median(abs(log(p.ratio)) for p in points))


def off_text(ratio: float, foretold: str = "") -> str:
    """`12% more`, `3% less`, `4.1 times as much`: found, against what was foretold; `than expected`
    or `as expected` after it where `foretold` says so."""
    if ratio >= 2:
        return f"{ratio:.3g} times as much{foretold and f' as {foretold}'}"
    share = f"{abs(ratio - 1):.0%}" if abs(ratio - 1) >= 0.095 else f"{abs(ratio - 1):.1%}"
    return f"{share} {'more' if ratio >= 1 else 'less'}{foretold and f' than {foretold}'}"


def factor_text(factor: float) -> str:
    """`4.2%`, or `a factor of 3`: how far off, either way."""
    if factor >= 2:
        return f"a factor of {factor:.3g}"
    return f"{factor - 1:.0%}" if factor >= 1.095 else f"{factor - 1:.1%}"


def diagonal(key: str, points: Sequence[Point], words: Words) -> Chart:
    """Foretold from left to right, found from bottom to top; on the line both are the same."""
    from plotly.graph_objects import Scatter

    low, high = _limits([v for p in points for v in (p.foretold, p.found)])
    line = Scatter(
        x=[low, high], y=[low, high], mode="lines", hoverinfo="skip", showlegend=False,
        line={"color": GREY, "width": 1, "dash": "dash"},
    )  # fmt: skip
    bars = [
        ((p.low, p.found), (p.high, p.found))
        for p in points
        if p.low and p.high and p.high / p.low < high / low and len(points) <= MOST_INTERVALS
    ]
    axis, unit = log_axis(low, high), plot_text(words.unit)
    figure = new_figure(
        [*_intervals(bars), line, *_marks(points, lambda p: (p.foretold, p.found), words)],
        xaxis={**axis, "title": {"text": f"{words.of} {words.foretold}, {unit}"}},
        yaxis={**axis, "title": {"text": f"{words.of} found, {unit}"}},
        legend=LEGEND_ABOVE,
    )
    grey = " A grey line is the interval that should hold 95%." if bars else ""
    said = (
        f"{words.of.capitalize()} {words.foretold} against found: above the dashed line more was "
        f"found than {words.foretold}.{grey} Both axes are logarithmic."
    )
    return Chart(key, figure, said, 440)


def in_order(key: str, points: Sequence[Point], words: Words) -> Chart:
    """How far off each probe was, in the order of probes."""
    reach = max(max(p.ratio, 1 / p.ratio) for p in points)
    reach = max(NARROWEST, reach)
    bars = [
        ((p.number, p.low / p.foretold), (p.number, p.high / p.foretold))
        for p in points
        if p.low and p.high and len(points) <= MOST_INTERVALS
    ]
    last = max(p.number for p in points)
    figure = new_figure(
        [*_intervals(bars), *_marks(points, lambda p: (p.number, p.ratio), words)],
        xaxis={"title": {"text": "probe"}, "range": [0.5, last + 0.5], "nticks": min(last, 12)},
        yaxis={**ratio_axis(reach), "title": {"text": f"found ÷ {words.foretold}"}},
        shapes=[{
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1,
            "line": {"color": GREY, "width": 1, "dash": "dash"},
        }],
        legend=LEGEND_ABOVE,
    )  # fmt: skip
    grey = f" The grey lines are the intervals that were {words.foretold}." if bars else ""
    said = (
        f"How far each probe was from the {words.of} {words.foretold}, in the order of probes: on "
        f"the dashed line it was found as {words.foretold}.{grey}"
    )
    return Chart(key, figure, said, 320)


def _marks(points: Sequence[Point], place: Any, words: Words) -> list[Scatter]:
    """Points by kind, a colour and a shape for each."""
    from plotly.graph_objects import Scatter

    kinds = list(dict.fromkeys(p.kind for p in points))
    return [
        Scatter(
            x=[place(p)[0] for p in own],
            y=[place(p)[1] for p in own],
            mode="markers",
            cliponaxis=False,
            name=plot_text(kind),
            showlegend=len(kinds) > 1,
            marker={
                "size": 9 if len(points) < 500 else 5,
                "symbol": SYMBOLS[at % len(SYMBOLS)],
                "color": CYCLE[at % len(CYCLE)],
            },
            text=[_hover(p, words) for p in own],
            hovertemplate="%{text}<extra></extra>",
        )
        for at, kind in enumerate(kinds)
        for own in [[p for p in points if p.kind == kind]]
    ]


def _hover(point: Point, words: Words) -> str:
    between, unit = "", plot_text(words.unit)
    if point.low and point.high:
        between = f" ({point.low:,.4g} to {point.high:,.4g})"
    return (
        f"probe {point.number}: {plot_text(point.title)}<br>"
        f"{words.foretold} {point.foretold:,.4g}{between} {unit}<br>"
        f"found {point.found:,.4g} {unit}, {off_text(point.ratio)}"
    )


def _intervals(bars: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> list[Scatter]:
    """All intervals as one broken line: thousands of error bars would make a page slow."""
    from plotly.graph_objects import Scatter

    if not bars:
        return []
    ends = [end for (start, stop) in bars for end in (start, stop, (None, None))]
    return [
        Scatter(
            x=[x for x, _ in ends],
            y=[y for _, y in ends],
            mode="lines",
            line={"color": "rgba(128,128,128,0.45)", "width": 3},
            hoverinfo="skip",
            name="interval",
            showlegend=False,
        )
    ]


def ratio_axis(reach: float) -> dict[str, Any]:
    """A logarithmic axis of ratios that reaches as far below 1 as above it."""
    reach = max(NARROWEST, reach)
    ticks = next(ticks for most, ticks in RATIO_TICKS if reach <= most)
    edge = _log10(reach) * 1.12
    return {
        "type": "log", "range": [-edge, edge], "tickvals": ticks,
        "ticktext": [f"× {r:g}" for r in ticks],
    }  # fmt: skip


def log_axis(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis from `low` to `high` with its numbers written out, three or more."""
    decades = range(int(_log10(low)) - 1, int(_log10(high)) + 2)
    ticks: list[float] = []
    for steps in STEPS if high / low > 4 else ():
        ticks = [10.0**d * step for d in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    ticks = ticks if len(ticks) >= 3 else _even_ticks(low, high)
    texts = [f"{tick:,.4g}" if tick < 1000 else f"{tick:,.0f}" for tick in ticks]
    return {
        "type": "log", "range": [_log10(low), _log10(high)], "tickvals": ticks, "ticktext": texts,
    }  # fmt: skip


def _even_ticks(low: float, high: float) -> list[float]:
    """Round numbers as far apart as they are on paper, for what lies close together."""
    rough = (high - low) / 5
    decade = 10.0 ** floor(_log10(rough))
    step = next(decade * s for s in (1, 2, 5, 10) if decade * s >= rough)
    return [n * step for n in range(ceil(low / step), floor(high / step) + 1)]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    space = max((high / low) ** 0.08, 1.05)
    return low / space, high * space


def _log10(value: float) -> float:
    return log(value) / log(10)
