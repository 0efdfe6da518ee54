"""The page's section of memory against images/s: every probe, the front, the recommended one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.core.schema import MeasurementRecord
from planner.core.units import GIB, format_bytes, format_rate
from planner.report.page.contents import Chart, Part, Section, Text
from planner.report.page.plotting import VERMILION, plot_text
from planner.report.settings import describe_setting
from search.report.run import Run
from search.report.statistics import front_figure
from search.report.wording import bytes_text, count

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_FAR = 1.6  # a budget so many times the largest probe is told, not drawn: the probes would be dots


def front(run: Run, key: str) -> list[Section]:
    """Memory against images/s; none where no step was probed."""
    parts = _parts(run, key)
    return [Section("front", f"Memory against {run.unit}/s", parts)] if parts else []


def _parts(run: Run, key: str) -> list[Part]:
    if not run.records:
        return []
    figure = front_figure(run.records, run.unit, run.budget_bytes)
    if figure is None:
        return [Text("No probe measured both a rate and memory.")]
    sizes = [r.used_bytes for r in run.records if r.used_bytes and r.status == "measured"]
    budget, said = run.budget_bytes, [
        f"Memory against {run.unit} per second of {count(len(sizes), 'probe')}: up is faster, left "
        "is smaller."
    ]  # fmt: skip
    if budget is not None:
        drawn = budget <= _FAR * max(sizes)
        if drawn:
            figure.add_vline(budget / GIB, line={"color": VERMILION}, annotation_text="budget")
        said.append(f"The budget is {format_bytes(budget)}{'' if drawn else ', far to the right'}.")
    plain = run.found.baseline if run.found is not None else None
    if plain is not None:
        _name_point(figure, run, plain, "plain default", "square-x-open")
    if run.best is not None:
        name = "recommended" if run.found is not None else "best so far"
        _name_point(figure, run, run.best, name, "star")
    return [Chart(f"{key}-front", figure, " ".join(said))]


def _name_point(
    figure: Figure, run: Run, record: MeasurementRecord, name: str, symbol: str
) -> None:
    """A probe set apart by its shape and its name."""
    if record.used_bytes is None:
        return
    rate = f"{format_rate(record.images_per_second)} {run.unit}/s, {bytes_text(record.used_bytes)}"
    setting = describe_setting(record.setting, record.model)
    figure.add_scatter(
        name=name, x=[record.used_bytes / GIB], y=[record.images_per_second],
        mode="markers", marker={"symbol": symbol, "size": 18, "color": VERMILION},
        hovertext=[f"{name}<br>{setting}<br>{plot_text(rate)}"],
        hoverinfo="text",
    )  # fmt: skip
