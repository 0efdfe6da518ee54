"""From what is alive at the peak to what nvidia-smi says, a bar for each thing that is added."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from planner.page.contents import Chart, Facts, Folded, Part, Section, Text
from planner.page.plotting import GREY, PURPLE, YELLOW, new_figure
from planner.report.colours import COLOURS, STACK
from planner.report.tables import BREAKDOWN_ROWS
from planner.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from planner.estimation import Estimate
    from planner.report.pages.step import Step

_RANGE = "expected range"
_SUM = "#5b6b7b"
_CONTEXT, _NCCL = "#8c564b", "#bcbd22"
_BUDGET = "#d62728"


class Bar(NamedTuple):
    """A row of the waterfall, from `base_bytes` on; a sum of all before it begins at 0."""

    name: str
    base_bytes: int
    num_bytes: int
    colour: str
    is_sum: bool = False


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
    found: list[Bar] = []
    height = 0

    def add(name: str, num_bytes: int, colour: str) -> None:
        nonlocal height
        if num_bytes:
            found.append(Bar(name, height, num_bytes, colour))
        height += num_bytes

    def total(name: str, num_bytes: int) -> None:
        assert height == num_bytes, f"{name}: {height} of {num_bytes}"
        found.append(Bar(name, 0, num_bytes, _SUM, is_sum=True))

    for category in STACK:
        add(BREAKDOWN_ROWS[category], breakdown.get(category, 0), COLOURS[category])
    total("alive at the peak", live)
    add("library workspaces", workspace, GREY)
    add("rounding of blocks", estimate.peak_allocated_bytes - live - workspace, YELLOW)
    total("allocated", estimate.peak_allocated_bytes)
    add("cached, free", estimate.peak_reserved_bytes - estimate.peak_allocated_bytes, PURPLE)
    total("reserved", estimate.peak_reserved_bytes)
    add("CUDA context", breakdown["cuda_context"], _CONTEXT)
    add("NCCL's own buffers", breakdown.get("communication", 0), _NCCL)
    total("device", estimate.device_total_bytes)
    return found


def _figure(estimate: Estimate, bars: list[Bar]) -> Figure:
    scale, unit = (GIB, "GiB") if estimate.device_total_bytes >= GIB else (MIB, "MiB")
    device = estimate.device_total_bytes
    trace = {
        "type": "bar", "orientation": "h", "y": [bar.name for bar in bars],
        "x": [bar.num_bytes / scale for bar in bars], "base": [b.base_bytes / scale for b in bars],
        "marker": {"color": [bar.colour for bar in bars]},
        "customdata": [
            (_text(bar), f"{bar.num_bytes / device:.1%} of the device total") for bar in bars
        ],
        "hovertemplate": "%{y}: %{customdata[0]}<br>%{customdata[1]}<extra></extra>",
        "showlegend": False,
    }  # fmt: skip
    low, high = estimate.low_bytes, estimate.high_bytes
    reach = {
        "type": "bar", "orientation": "h", "y": [_RANGE], "x": [(high - low) / scale],
        "base": [low / scale], "marker": {"color": _SUM, "opacity": 0.55},
        "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip
    traces = [trace, reach]
    top = estimate.high_bytes
    budget = estimate.budget_bytes
    if budget is not None and budget <= 2.5 * device:
        top = max(top, budget)
        traces.append({
            "type": "scatter", "mode": "lines", "x": [budget / scale] * 2,
            "y": [bars[0].name, _RANGE], "line": {"color": _BUDGET, "dash": "dash"},
            "name": f"budget, {format_bytes(budget)}", "hoverinfo": "name", "showlegend": True,
        })  # fmt: skip
    names = [*(f"{bar.name}<br>{_text(bar)}" for bar in bars), f"{_RANGE}<br>{_between(low, high)}"]
    return new_figure(
        traces,
        yaxis={
            "type": "category", "range": [len(bars) + 0.5, -0.5], "fixedrange": True,
            "showgrid": False, "tickmode": "array", "tickvals": list(range(len(names))),
            "ticktext": names, "ticklabelstandoff": 6,
        },
        xaxis={
            "title": {"text": unit}, "range": [0, 1.04 * top / scale], "fixedrange": True,
            "tickangle": 0, "nticks": 8,
        },
        barmode="overlay",
        bargap=0.25,
    )  # fmt: skip


def _between(low: int, high: int) -> str:
    """`1.01 to 2.40 GiB`: the unit once where both have the same."""
    (first, unit), last = format_bytes(low).split(), format_bytes(high)
    return f"{first if last.endswith(unit) else format_bytes(low)} to {last}"


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
        text += f" That is {rest} the budget of {format_bytes(budget)}."
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
        f"{_spare(estimate.headroom_bytes)} against the budget of {format_bytes(budget)}; "
        f"{_spare(budget - estimate.high_bytes)} if the device total is the "
        f"{format_bytes(estimate.high_bytes)} at the top of its range."
    )
    return [("Headroom", text)]


def _spare(num_bytes: int) -> str:
    return f"{format_bytes(abs(num_bytes))} {'to spare' if num_bytes >= 0 else 'too much'}"


def _list(title: str, lines: Iterable[str]) -> list[Part]:
    text = "\n".join(f"– {line}" for line in lines)
    return [Folded(title, [Text(text)])] if text else []
