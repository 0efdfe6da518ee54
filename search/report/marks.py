"""How probes are marked in every chart of a search: precision by colour, checkpointing by shape,
compiled ones hollow, and each way to fail by a shape and a colour of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from planner.page.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    plot_text,
)
from planner.schema.setting import PRECISIONS
from search.report.probe import Probe
from search.report.wording import (
    ENDS,
    end_text,
)

_COLOURS = (BLUE, SKY, GREEN, ORANGE, PURPLE, YELLOW)
PRECISION_COLOURS: dict[str, str] = dict(zip(PRECISIONS, _COLOURS, strict=True))
_SHAPES = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "pentagon",
    "star-triangle-down",
    "hexagon",
)
_END_MARKS = dict(
    zip(
        ENDS,
        (
            ("x", VERMILION), ("triangle-left", VERMILION), ("hourglass", ORANGE),
            ("cross", PURPLE), ("cross", SKY), ("asterisk-open", YELLOW), ("circle-x-open", GREY),
            ("diamond-wide", GREY), ("line-ew-open", GREY),
        ),
        strict=True,
    )
)  # fmt: skip
_FEW_TICKS = 12
FAILED = ("x", VERMILION)  # an end that is not known here


def by_kind(probes: Sequence[Probe]) -> dict[tuple[str, str, bool], list[Probe]]:
    """Those with a rate by what their marks show: precisions in the order of PRECISIONS."""
    groups: dict[tuple[str, str, bool], list[Probe]] = {}
    for probe in probes:
        if probe.record.images_per_second is not None and probe.end in ("measured", "over_budget"):
            groups.setdefault(probe.kind, []).append(probe)
    return dict(sorted(groups.items(), key=lambda g: (PRECISIONS.index(g[0][0]), g[0][1:])))


def by_end(probes: Sequence[Probe]) -> dict[str, list[Probe]]:
    """Those that did not run within the budget by how they ended, in the order of ENDS."""
    groups: dict[str, list[Probe]] = {}
    for probe in probes:
        if not probe.ran:
            groups.setdefault(probe.end, []).append(probe)
    order = list(ENDS)
    return dict(sorted(groups.items(), key=lambda g: order.index(g[0]) if g[0] in order else 99))


def shapes(probes: Sequence[Probe]) -> dict[str, str]:
    """A shape for each value of checkpointing that was probed."""
    seen = sorted({probe.kind[1] for probe in probes}, key=lambda v: (v != "none", v))
    return {value: _SHAPES[i % len(_SHAPES)] for i, value in enumerate(seen)}


def kind_mark(kind: tuple[str, str, bool], shape: dict[str, str]) -> dict[str, Any]:
    """The legend entry and the marker of a kind, in the legend's group of its precision."""
    precision, checkpointing, compiled = kind
    saved = "no checkpointing" if checkpointing == "none" else f"checkpointing {checkpointing}"
    symbol = shape[checkpointing] + ("-open" if compiled else "")
    colour = PRECISION_COLOURS[precision]
    return {
        "name": plot_text(f"{saved}, {'compiled' if compiled else 'eager'}"),
        "legendgroup": precision,
        "legendgrouptitle": {"text": plot_text(precision)},
        "marker": {
            "symbol": symbol,
            "color": colour,
            "size": 10,
            "line": {"width": 2, "color": colour},
        },
    }


def precision_mark(precision: str) -> dict[str, Any]:
    """The legend entry and the marker of a precision, where nothing else is told apart."""
    marker = {"color": PRECISION_COLOURS[precision], "size": 8}
    return {"name": plot_text(precision), "marker": marker}


def end_mark(end: str) -> dict[str, Any]:
    """The legend entry and the marker of a way to fail."""
    symbol, colour = _END_MARKS.get(end, FAILED)
    return {
        "name": plot_text(end_text(end)),
        "legendrank": 2000,
        "marker": {
            "symbol": symbol,
            "color": colour,
            "size": 11,
            "line": {"width": 2 if "open" in symbol else 0, "color": colour},
        },
    }


def points(
    x: Iterable[Any], y: Iterable[Any], hovertext: Iterable[str], **more: Any
) -> dict[str, Any]:
    """Marks, and what stands beside the pointer at each of them."""
    drawn = {"type": "scatter", "mode": "markers", "x": list(x), "y": list(y)}
    return {**drawn, "hovertext": list(hovertext), "hoverinfo": "text", **more}


def named_point(
    name: str, x: float, y: float, said: str, place: str, mark: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """One point with its name beside it, at `place` of it; `said` stands beside the pointer."""
    shown = {"name": name, "text": [name], "textposition": place, "cliponaxis": False}
    return points([x], [y], [said], mode="markers+text", marker=mark, **shown, **more)


def best_line(rates: Sequence[float]) -> dict[str, Any]:
    """The fastest so far as steps over the probes; `rates` are 0 where a probe does not count."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "fastest so far",
        "x": list(range(1, len(rates) + 1)),
        "y": [best or None for best in accumulate(rates, max)],
        "line": {"shape": "hv", "color": VERMILION, "width": 2},
        "hoverinfo": "skip",
    }


def legend_below() -> dict[str, Any]:
    """A legend at the chart's lower edge, that takes its room from the chart; each entry switches
    what it names."""
    return {
        "groupclick": "toggleitem",
        "orientation": "h",
        "yref": "container",
        "y": 0,
        "yanchor": "bottom",
    }


def probe_axis(number: int) -> dict[str, Any]:
    """The axis of probes by their number: whole ones."""
    step = {"dtick": 1} if number <= _FEW_TICKS else {}
    return {"title": {"text": "probe"}, "rangemode": "tozero", **step}


def order_layout(number: int, rates: dict[str, Any]) -> dict[str, Any]:
    """Of a chart of `number` probes in order, by the axis of their `rates`."""
    return {
        "xaxis": probe_axis(number), "yaxis": rates, "legend": legend_below(),
        "hovermode": "closest",
    }  # fmt: skip
