"""From what is alive at the peak to what nvidia-smi says, a bar for each thing that is added."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from planner.core.units import GIB, MIB, format_bytes
from planner.report.colours import COLOURS, CONTEXT, STACK
from planner.report.estimates import BREAKDOWN_ROWS, notes, totals_table
from planner.report.page.contents import Chart, Part, Section
from planner.report.page.plotting import BLUE, GREY, STEEL, VERMILION, new_figure
from planner.report.pages.step import Step

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from planner.estimation.estimate import Estimate


class Bar(NamedTuple):
    """A row of the waterfall: what is added, or the sum of all before it."""

    name: str
    num_bytes: int
    is_sum: bool = False
    colour: str = BLUE


def totals(step: Step, key: str) -> Section:
    """Allocated, reserved and device, and what lies between them."""
    estimate = step.estimate
    bars = waterfall(estimate)
    parts: list[Part] = [
        Chart(f"{key}-totals-chart", _figure(estimate, bars), _said(estimate), 90 + 40 * len(bars)),
        totals_table(estimate),
        *notes("Assumed", estimate.assumed),
        *notes("Left out", estimate.left_out),
    ]
    return Section("totals", "Allocated, reserved, device", parts)


def waterfall(estimate: Estimate) -> list[Bar]:
    """The bars from the first category to the device total; each sum is what those before it come
    to."""
    breakdown = estimate.breakdown
    live, workspace = estimate.peak_live_bytes, breakdown["workspace"]
    allocated, reserved = estimate.peak_allocated_bytes, estimate.peak_reserved_bytes
    bars = [
        *(
            Bar(BREAKDOWN_ROWS[each], breakdown.get(each, 0), colour=COLOURS[each])
            for each in STACK
        ),
        Bar("alive at the peak", live, is_sum=True),
        Bar("library workspaces", workspace),
        Bar("rounding of blocks", allocated - live - workspace),
        Bar("allocated", allocated, is_sum=True),
        Bar("cached, free", reserved - allocated),
        Bar("reserved", reserved, is_sum=True),
        Bar("CUDA context", breakdown["cuda_context"], colour=CONTEXT),
        Bar("NCCL's own buffers", breakdown.get("communication", 0), colour=CONTEXT),
        Bar("device", estimate.device_total_bytes, is_sum=True),
    ]
    return [bar for bar in bars if bar.num_bytes]


def _figure(estimate: Estimate, bars: list[Bar]) -> Figure:
    from plotly.graph_objects import Bar as Drawn

    scale, unit = (GIB, "GiB") if estimate.device_total_bytes >= GIB else (MIB, "MiB")
    before = [0, *accumulate(0 if bar.is_sum else bar.num_bytes for bar in bars)]
    trace = Drawn(
        orientation="h", y=[f"{bar.name}<br>{_text(bar)}" for bar in bars],
        x=[bar.num_bytes / scale for bar in bars], name=unit,
        base=[0 if bar.is_sum else at / scale for bar, at in zip(bars, before, strict=False)],
        marker={"color": [STEEL if bar.is_sum else bar.colour for bar in bars]},
        hoverinfo="y", showlegend=False,
    )  # fmt: skip
    figure = new_figure(
        [trace],
        yaxis={"autorange": "reversed", "showgrid": False, "ticklabelstandoff": 6},
        xaxis={"title": {"text": unit}, "rangemode": "tozero"},
    )
    budget = estimate.budget_bytes
    figure.add_vrect(
        estimate.low_bytes / scale, estimate.high_bytes / scale, fillcolor=GREY, opacity=0.2,
        line_width=0, annotation_text="expected", annotation_position="bottom right",
    )  # fmt: skip
    if budget is not None and budget <= 2.5 * estimate.device_total_bytes:
        figure.add_vline(
            budget / scale, line={"color": VERMILION, "dash": "dash"}, annotation_text="budget"
        )
    return figure


def _text(bar: Bar) -> str:
    return ("" if bar.is_sum else "+ ") + format_bytes(bar.num_bytes)


def _said(estimate: Estimate) -> str:
    budget = estimate.budget_bytes
    text = (
        f"From {format_bytes(estimate.peak_live_bytes)} of tensors to "
        f"{format_bytes(estimate.device_total_bytes)} of the device's memory, which is expected "
        f"between {format_bytes(estimate.low_bytes)} and {format_bytes(estimate.high_bytes)}."
    )
    if budget is not None and estimate.headroom_bytes is not None:
        spare = estimate.headroom_bytes
        rest = f"{format_bytes(spare)} below" if spare >= 0 else f"{format_bytes(-spare)} above"
        text += f" The total is {rest} the {format_bytes(budget)} of the device."
    return text
