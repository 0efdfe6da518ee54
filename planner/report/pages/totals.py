"""From what is alive at the peak to what nvidia-smi says, a bar for each thing that is added."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from planner.core.units import GIB, MIB, format_bytes
from planner.report.colours import COLOURS, CONTEXT, STACK
from planner.report.page.contents import Chart, Facts, Folded, Part, Section, Text
from planner.report.page.plotting import BLUE, GREY, STEEL, VERMILION, new_figure
from planner.report.pages.step import Step
from planner.report.tables import BREAKDOWN_ROWS

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
        Facts(_meanings(estimate)),
        *(_list("Assumed", estimate.assumed)),
        *(_list("Left out", estimate.left_out)),
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


def _meanings(estimate: Estimate) -> list[tuple[str, str]]:
    """A sentence for each total, and for what lies between them."""
    outside = "The CUDA context lies"
    if estimate.breakdown.get("communication"):
        outside = "The CUDA context and NCCL's own buffers lie"
    workspace, allocated = estimate.breakdown["workspace"], estimate.peak_allocated_bytes
    free = estimate.peak_reserved_bytes - allocated
    rounding = allocated - estimate.peak_live_bytes - workspace
    return [
        (
            "Alive at the peak",
            f"{format_bytes(estimate.peak_live_bytes)} of tensors at one instant, each rounded up "
            f"to 512 B: {estimate.peak_at}.",
        ),
        (
            "Allocated",
            f"{format_bytes(allocated)}, as torch.cuda.max_memory_allocated() will report. "
            f"cuBLAS's workspaces take {format_bytes(workspace)} of it; blocks that are larger "
            f"than their requests, {format_bytes(rounding)}.",
        ),
        (
            "Reserved",
            f"{format_bytes(estimate.peak_reserved_bytes)}, as torch.cuda.max_memory_reserved() "
            f"will report: {format_bytes(free)} more, since PyTorch keeps what it took from the "
            "driver, in segments that not every request fits into.",
        ),
        (
            "Device",
            f"{format_bytes(estimate.device_total_bytes)}, as nvidia-smi will report of the "
            "process. "
            f"{outside} outside PyTorch's allocator.",
        ),
        *_headroom(estimate),
    ]


def _headroom(estimate: Estimate) -> list[tuple[str, str]]:
    if estimate.headroom_bytes is None or estimate.budget_bytes is None:
        return []
    budget = estimate.budget_bytes
    text = (
        f"{_spare(estimate.headroom_bytes)} against the {format_bytes(budget)} of the device; "
        f"{_spare(budget - estimate.high_bytes)} if the device total is the "
        f"{format_bytes(estimate.high_bytes)} at the top of its range."
    )
    return [("Headroom", text)]


def _spare(num_bytes: int) -> str:
    return f"{format_bytes(abs(num_bytes))} {'to spare' if num_bytes >= 0 else 'too much'}"


def _list(title: str, lines: Iterable[str]) -> list[Part]:
    text = "\n".join(f"– {line}" for line in lines)
    return [Folded(title, [Text(text)])] if text else []
