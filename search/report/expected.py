"""What the search expected of its probes, against what they found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

from planner.core.schema import MeasurementRecord
from planner.core.units import GIB
from planner.report.page.contents import Chart, Part, Section, Tabs, Text
from planner.report.page.plotting import GREY, LEGEND_ABOVE, new_figure, plot_text
from planner.report.settings import describe_setting
from search.report.run import Run

TITLE = "Expected against found"
MOST_TOLD = 10  # times its lower end: an interval that is wider tells nothing, by our judgement


@dataclass(frozen=True)
class Point:
    """One figure that was expected and found, of the `number`-th probe. `kind` groups points by
    colour; `low` and `high` are the interval of what was expected."""

    number: int
    title: str
    kind: str
    expected: float
    found: float
    low: float
    high: float


def expected_sections(run: Run, key: str) -> list[Section]:
    """The section; none where nothing was expected of any probe, or nothing measured."""
    tabs: list[tuple[str, list[Part]]] = []
    for of, unit in (("rate", f"{run.unit}/s"), ("memory", "GiB")):
        numbered = enumerate(run.records, start=1)
        points = [point for n, record in numbered if (point := _point(n, record, of)) is not None]
        if points:
            chart = diagonal(f"{key}-expected-{of}", points, of, unit)
            tabs.append((of.capitalize(), [Text(coverage(points, of)), chart]))
    return [Section("expected", TITLE, [Tabs(f"{key}-expected", tabs)])] if tabs else []


def _point(number: int, record: MeasurementRecord, of: str) -> Point | None:
    """None where it was not measured, nothing was expected of it, or a figure has no place on a
    logarithmic axis: no file of ours holds such."""
    expected = record.expected
    if expected is None or record.status != "measured":
        return None
    figures, found, scale = expected.images_per_second, record.images_per_second, 1
    if of == "memory":
        figures, found, scale = expected.used_bytes, record.used_bytes, GIB
    if figures is None or not found or not all(1e-15 < each < 1e30 for each in (*figures, found)):
        return None
    low, middle, high = (figure / scale for figure in figures)
    return Point(
        number, describe_setting(record.setting, record.model), expected.phase, middle,
        found / scale, low, high,
    )  # fmt: skip


def coverage(points: Sequence[Point], of: str) -> str:
    """How many were found in their interval, and by how much half of them were off."""
    told = [p for p in points if p.high <= MOST_TOLD * p.low]
    within = sum(p.low <= p.found <= p.high for p in told)
    off = exp(median(abs(log(p.found) - log(p.expected)) for p in points)) - 1
    left = len(points) - len(told)  # whose interval would hold whatever was found
    untold = f"; of {left} more the search knew too little to say" if left else ""
    return (
        f"{within:,} of {len(told):,} probes found a {of} within the interval that should hold 95% "
        f"of them{untold}. Half of all were off by no more than {off:.1%}."
    )


def diagonal(key: str, points: Sequence[Point], of: str, unit: str) -> Chart:
    """Expected from left to right, found from bottom to top; on the line both are the same."""
    from plotly.graph_objects import Scatter

    ends = [pick(v for p in points for v in (p.expected, p.found)) for pick in (min, max)]
    line = Scatter(
        x=ends, y=ends, mode="lines", hoverinfo="skip", showlegend=False,
        line={"color": GREY, "dash": "dash"},
    )  # fmt: skip
    traces, unit = [line], plot_text(unit)
    for kind in dict.fromkeys(p.kind for p in points):
        own = [p for p in points if p.kind == kind]
        said = [
            f"probe {p.number}: {plot_text(p.title)}<br>expected {p.expected:,.4g} ({p.low:,.4g} "
            f"to {p.high:,.4g}) {unit}<br>found {p.found:,.4g}, {p.found / p.expected - 1:+.1%}"
            for p in own
        ]
        traces.append(
            Scatter(
                name=plot_text(kind), x=[p.expected for p in own], y=[p.found for p in own],
                mode="markers", marker={"size": 9}, hoverinfo="text", hovertext=said,
            )
        )  # fmt: skip
    figure = new_figure(
        traces,
        xaxis={"type": "log", "title": {"text": f"{of} expected, {unit}"}},
        yaxis={"type": "log", "title": {"text": f"{of} found, {unit}"}},
        legend=LEGEND_ABOVE,
    )
    said_of = (
        f"{of.capitalize()} expected against found: above the dashed line more was found than "
        "expected. Both axes are logarithmic."
    )
    return Chart(key, figure, said_of, 440)
