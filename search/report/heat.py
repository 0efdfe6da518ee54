"""The fastest of each batch and each value of the axis that matters most, as a map."""

from __future__ import annotations

from collections.abc import Sequence

from planner.page.contents import Chart, Part
from planner.page.plotting import new_figure, plot_text
from planner.report.settings import describe_setting, value_text
from planner.schema import MeasurementRecord
from search.axes import in_order
from search.report.against import BELOW_BUTTONS
from search.report.axis_pairs import Ran
from search.report.importance import axis_name

MOST_CELLS_WITH_TEXT = 160
MOST_ROWS = 40  # that are each as high as their text; of more, all are made lower
FAILED = {"out_of_memory": "no memory", "timed_out": "timed out", "measured": ""}


def heat_parts(
    records: Sequence[MeasurementRecord],
    ran: Sequence[Ran],
    axis: str,
    key: str,
    per_second: str,
) -> list[Part]:
    """Batches from top to bottom, values from left to right; none where either has only one."""
    from plotly.graph_objects import Heatmap

    batches = sorted({r.setting.batch_size for r in records})
    values = in_order(getattr(r.setting, axis) for r in records)
    if len(batches) < 2 or len(values) < 2 or not ran:
        return []
    best: dict[tuple[int, object], Ran] = {}
    for one in sorted(ran, key=lambda r: r.rate):
        best[one.setting.batch_size, getattr(one.setting, axis)] = one
    ends = {(r.setting.batch_size, getattr(r.setting, axis)): r.status for r in records}
    cells = [(batch, value) for batch in batches for value in values]
    hover = {at: _hover(best.get(at), ends.get(at), per_second) for at in cells}
    words = {at: f"{best[at].rate:,.4g}" if at in best else _end_text(ends.get(at)) for at in cells}
    figure = new_figure(
        [Heatmap(
            x=[plot_text(value_text(value)) for value in values],
            y=[str(batch) for batch in batches],
            z=[[best[b, v].rate if (b, v) in best else None for v in values] for b in batches],
            text=[[words[b, v] for v in values] for b in batches],
            customdata=[[hover[b, v] for v in values] for b in batches],
            texttemplate="%{text}" if len(cells) <= MOST_CELLS_WITH_TEXT else "",
            hovertemplate=f"batch %{{y}}, {axis_name(axis)} %{{x}}<br>%{{customdata}}"
            "<extra></extra>",
            hoverongaps=True, colorscale="Cividis", xgap=2, ygap=2,
            colorbar={"title": {"text": plot_text(per_second)}, "thickness": 12},
        )],
        margin=BELOW_BUTTONS,
        xaxis={"type": "category", "title": {"text": axis_name(axis)}, "showgrid": False},
        yaxis={"type": "category", "title": {"text": "batch"}, "autorange": "reversed",
               "showgrid": False},
    )  # fmt: skip
    said = (
        f"The fastest setting of each batch and {axis_name(axis)}, whatever its other axes, in "
        f"{per_second}. An empty place was not probed, or did not run with anything that was tried."
    )
    return [Chart(f"{key}-axes-heat", figure, said, 130 + 30 * min(len(batches), MOST_ROWS))]


def _hover(best: Ran | None, end: str | None, per_second: str) -> str:
    if best is not None:
        return plot_text(f"{best.rate:,.4g} {per_second}: {describe_setting(best.setting)}")
    return "not probed" if end is None else f"did not run: {end.replace('_', ' ')}"


def _end_text(end: str | None) -> str:
    return "" if end is None else FAILED.get(end, "failed")
