"""Where the time of a search went: one bar of what its probes did."""

from __future__ import annotations

from collections.abc import Sequence

from planner.page.contents import Chart
from planner.page.plotting import GREEN, GREY, ORANGE, VERMILION, new_figure
from planner.schema import MeasurementRecord
from planner.units import format_seconds
from search.report.marks import legend_below

_COLOURS = {
    "steps that count": GREEN,
    "compiling": ORANGE,
    "start, build and warm-up": GREY,
    "probes that did not end well": VERMILION,
}


def spent_seconds(records: Sequence[MeasurementRecord]) -> dict[str, float]:
    """Seconds of all probes together by what they went to; they add up to `probe_seconds`."""
    spent = dict.fromkeys(("steps that count", "compiling", "start, build and warm-up"), 0.0)
    failed = 0.0
    for record in records:
        if record.status != "measured":
            failed += record.probe_seconds
            continue
        steps = min(sum(record.step_seconds), record.probe_seconds)
        compiling = min(record.compile_seconds or 0.0, record.probe_seconds - steps)
        spent["steps that count"] += steps
        spent["compiling"] += compiling
        spent["start, build and warm-up"] += record.probe_seconds - steps - compiling
    return {**spent, "probes that did not end well": failed}


def spent_chart(records: Sequence[MeasurementRecord], key: str) -> Chart:
    """One stacked bar."""
    spent = {what: seconds for what, seconds in spent_seconds(records).items() if seconds > 0}
    total = sum(spent.values())
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": what,
            "x": [seconds],
            "y": [""],
            "marker": {"color": _COLOURS[what]},
            "text": [format_seconds(seconds)],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "hovertext": [f"{what}: {format_seconds(seconds)}, {seconds / total:.0%}"],
            "hoverinfo": "text",
        }
        for what, seconds in spent.items()
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {"showticklabels": False},
        "legend": {**legend_below(), "traceorder": "normal"},
    }
    said = "; ".join(f"{what} {format_seconds(seconds)}" for what, seconds in spent.items())
    figure = new_figure(traces, **layout)
    return Chart(
        key, figure, f"Where the time of the probes went: {said or 'none was taken'}.", 210
    )
