"""The step's memory over time, as a chart that `assets/timeline.js` resamples where it is zoomed.

Every point of the step is on the page: whole arrays of differences, which compress to little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from planner.core.units import GIB, MIB, format_bytes
from planner.ledger.ledger import Category
from planner.memory.caching_allocator import UNIT_BYTES
from planner.report.chrome_trace import times_of_moves
from planner.report.colours import COLOURS, STACK
from planner.report.page.contents import Cell, Chart, Number, Part, Section, Table, Text
from planner.report.page.plotting import (
    LEGEND_ABOVE,
    PURPLE,
    VERMILION,
    YELLOW,
    new_figure,
    plot_text,
)
from planner.report.pages.course import Course
from planner.report.pages.recomputation import RECOMPUTATION, UPDATE
from planner.report.pages.step import Step
from planner.throughput.result import datasheet_rates, exchanges_of
from planner.throughput.spans import step_spans

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


NUM_COLUMNS = 600  # drawn at first; the page's script knows how wide it is and draws as many
SCRIPT = "timeline"
_STRETCHES = {RECOMPUTATION: YELLOW, UPDATE: VERMILION}
_ROOM = 1.2  # of what is drawn: the names of phases stand above it, upright where they are narrow
_BAND = "rgba(128, 128, 128, 0.11)"
_LINE = "rgba(128, 128, 128, 0.75)"


def over_time(step: Step, course: Course, key: str) -> Section:
    """Live bytes by category and what the allocator reserves; by stream where there are several."""
    parts: list[Part] = [
        Chart(
            f"{key}-memory-chart", _figure(step, course), _said(step, course), 545, SCRIPT,
            timeline_data(course, clock(step, course)), _by_phase(course),
        )
    ]  # fmt: skip
    parts += [Text(line, "note") for line in _notes(step, course)]
    if len(course.reserved_of) > 1:
        parts.append(_by_stream(course))
    return Section("memory", "Memory over the step", parts)


def clock(step: Step, course: Course) -> list[int]:
    """The nanosecond of each point, from the device's first operation of the step on: when it
    begins the operation that follows the point. Empty where no time is predicted, or where the
    device runs the operations in another order."""
    rates = datasheet_rates(step.gpu, step.estimate.model)
    if rates is None:
        return []
    ledger, setting = step.ledger, step.estimate.setting
    exchanges = exchanges_of(ledger, setting, step.gpu, step.link)
    spans = step_spans(ledger, setting, rates, exchanges)
    times = times_of_moves(ledger, course.live.events, spans)
    in_order = all(a <= b for a, b in pairwise(times))
    return [time - times[0] for time in times] if in_order else []


def timeline_data(course: Course, times: Sequence[int] = ()) -> dict[str, Any]:
    """What the chart's script needs: every point, in units of 512 B and as differences (the first
    entry is the value at point 0); words are numbers of `words`, and shown as they are. `times` are
    the points' nanoseconds."""
    live, words = course.live, Words()
    series: dict[str, Sequence[int]] = {c: live.by_category[c] for c in shown_categories(course)}
    series |= {"allocated": course.allocated, "reserved": course.reserved}
    moves = course.moves
    return {
        "unit_bytes": UNIT_BYTES,
        "scale_bytes": _scale(course)[0],
        "scale": _scale(course)[1],
        "stack": shown_categories(course),
        "series": {name: _differences(values) for name, values in series.items()},
        "bytes": [move.num_bytes // UNIT_BYTES for move in moves],
        "category": words.numbers(category_text(move.category) for move in moves),
        "label": words.numbers(move.label.removeprefix("aten.") for move in moves),
        "path": words.numbers(move.path for move in moves),
        "during": words.numbers(move.during.removeprefix("aten.") for move in moves),
        "at": words.numbers(move.at for move in moves),
        "stream": words.numbers(move.stream for move in moves),
        "phases": [
            {
                "name": phase.name.replace("_", " "),
                "start": phase.start,
                "stop": phase.stop,
                "micro_batch": micro,
            }
            for phase, micro in zip(live.phases, course.micro_batches, strict=True)
        ],
        "nanoseconds": [b - a for a, b in pairwise([0, *times])],
        "stretches": [[s.kind, s.start, s.stop] for s in course.stretches],
        "words": words.known,
    }


class Words:
    """Texts as numbers."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self._numbers: dict[str, int] = {}

    def numbers(self, texts: Iterable[str]) -> list[int]:
        return [self._number(text) for text in texts]

    def _number(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self.known))
        if number == len(self.known):
            self.known.append(plot_text(text))
        return number


def thinned(course: Course, num_columns: int = NUM_COLUMNS) -> list[int]:
    """Points that keep the most alive and the most reserved of each of `num_columns` columns, and
    the last one."""
    live, reserved = course.live, course.reserved
    chosen, bounds = live.thin(num_columns)
    count = len(live.total)
    most_reserved = (
        max(range(start, stop), key=reserved.__getitem__)
        for start, stop in zip(bounds, [*bounds[1:], count], strict=True)
    )
    return sorted({*chosen, *most_reserved, count - 1})


def shown_categories(course: Course) -> list[Category]:
    """Those of which anything is ever alive, from the bottom of the stack up."""
    return [c for c in STACK if max(course.live.by_category[c])]


def category_text(category: str) -> str:
    return category.replace("_", " ")


def _differences(values: Sequence[int]) -> list[int]:
    """In units; they are whole ones, as every size is rounded to 512 B."""
    units = [value // UNIT_BYTES for value in values]
    return [units[0], *(b - a for a, b in pairwise(units))]


def _scale(course: Course) -> tuple[int, str]:
    return (GIB, "GiB") if max(course.reserved) >= GIB else (MIB, "MiB")


def _figure(step: Step, course: Course) -> Figure:
    live, (scale, unit) = course.live, _scale(course)
    points = thinned(course)
    traces: list[dict[str, Any]] = [
        _area(category, live.by_category[category], points, scale, live.peak)
        for category in shown_categories(course)
    ]
    traces += [
        _line("live", live.total, points, scale, {"width": 1, "color": _LINE}, legend=False),
        _line("allocated", course.allocated, points, scale,
              {"width": 1, "color": PURPLE, "dash": "dot"}),
        _line("reserved", course.reserved, points, scale, {"width": 2, "color": PURPLE}),
        *_strips(course),
        _at_peak(course, scale),
    ]  # fmt: skip
    top = max(course.reserved)
    limit = limit_of(step)
    if limit is not None and is_near(course, limit):
        top = max(top, limit)
        traces.append(_limit_line(limit, len(live.total) - 1, scale))
    layout = _layout(course, top / scale, f"{unit} of memory")
    return new_figure(traces, **layout)


def _area(
    category: Category, values: Sequence[int], points: list[int], scale: int, peak: int
) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "stackgroup": "live", "x": points,
        "y": [values[i] / scale for i in points], "line": {"width": 0, "shape": "hv"},
        "fillcolor": COLOURS[category], "hoverinfo": "skip", "meta": {"series": category},
        "name": f"{category_text(category)}, {format_bytes(values[peak])}",
        "legendgroup": category,
    }  # fmt: skip


def _line(
    name: str, values: Sequence[int], points: list[int], scale: int, line: Mapping[str, Any],
    *, legend: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """A course of bytes. The most of it stands in the legend, but for what is allocated: there the
    estimate's is that of two playings."""
    most = "" if name == "allocated" else f", {format_bytes(max(values))}"
    return {
        "type": "scatter", "mode": "lines", "x": points, "y": [values[i] / scale for i in points],
        "line": {"shape": "hv", **line}, "hoverinfo": "text" if name == "live" else "skip",
        "meta": {"series": name}, "name": f"{name}{most}",
        "showlegend": legend,
    }  # fmt: skip


def _strips(course: Course) -> list[dict[str, Any]]:
    """What in backward is no backward, along the bottom."""
    found = []
    for kind, colour in _STRETCHES.items():
        ends = [(s.start, s.stop) for s in course.stretches if s.kind == kind]
        if ends:
            points = [point for start, stop in ends for point in (start, stop, None)]
            found.append({
                "type": "scatter", "mode": "lines", "x": points, "y": [0.012] * len(points),
                "yaxis": "y2", "line": {"width": 7, "color": colour}, "hoverinfo": "skip",
                "meta": {"points": points}, "name": kind,
            })  # fmt: skip
    return found


def _at_peak(course: Course, scale: int) -> dict[str, Any]:
    live = course.live
    return {
        "type": "scatter", "mode": "markers", "x": [live.peak], "y": [live.peak_bytes / scale],
        "marker": {
            "symbol": "triangle-down", "size": 13, "color": "#ffffff",
            "line": {"width": 2, "color": "#000000"},
        },
        "hoverinfo": "skip", "meta": {"points": [live.peak]}, "cliponaxis": False,
        "name": f"peak, {format_bytes(live.peak_bytes)}",
    }  # fmt: skip


def _limit_line(limit: int, last: int, scale: int) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "x": [0, last], "y": [limit / scale] * 2,
        "line": {"width": 2, "color": "#d62728", "dash": "dash"}, "hoverinfo": "skip",
        "meta": {"points": [0, last]}, "name": f"limit, {format_bytes(limit)}",
    }  # fmt: skip


def _layout(course: Course, top: float, title: str) -> dict[str, Any]:
    last = len(course.live.total) - 1
    return {
        "hovermode": "x", "hoverdistance": -1, "dragmode": "zoom",
        "xaxis": {
            "title": {"text": "allocations and releases"}, "range": [0, last],
            "showspikes": True, "spikemode": "across", "spikethickness": 1, "spikedash": "solid",
            "spikesnap": "hovered data", "spikecolor": _LINE, "showgrid": False,
            "hoverformat": ",.0f", "tickformat": ",d", "minallowed": 0, "maxallowed": last,
        },
        "yaxis": {"title": {"text": title}, "range": [0, _ROOM * top], "fixedrange": True},
        "yaxis2": {
            "overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True,
        },
        "legend": LEGEND_ABOVE,
        "shapes": [
            {
                "type": "rect", "xref": "x", "yref": "paper", "x0": phase.start, "x1": phase.stop,
                "y0": 0, "y1": 1, "line": {"width": 0}, "layer": "below",
                "fillcolor": _BAND if number % 2 else "rgba(0, 0, 0, 0)",
            }
            for number, phase in enumerate(course.live.phases)
        ],
        "annotations": [
            {
                "xref": "x", "yref": "paper", "x": (phase.start + phase.stop) / 2, "y": 1,
                "yanchor": "top", "text": phase.name.replace("_", " "), "showarrow": False,
                "font": {"size": 11},
                "visible": phase.stop - phase.start > last / 8,
            }
            for phase in course.live.phases
        ],
    }  # fmt: skip


def limit_of(step: Step) -> int | None:
    """What the allocator may reserve at most: the budget less what lies beside it."""
    estimate = step.estimate
    if estimate.budget_bytes is None:
        return None
    return estimate.budget_bytes - (estimate.device_total_bytes - estimate.peak_reserved_bytes)


def is_near(course: Course, limit: int) -> bool:
    """A limit more than twice what is reserved would only squeeze the picture."""
    return 0 < limit <= 2 * max(course.reserved)


def _said(step: Step, course: Course) -> str:
    peak = format_bytes(course.live.peak_bytes)
    return (
        f"Bytes alive during a step of a warm training, by category: at most {peak}, in "
        f"{step.estimate.peak_at}. The legend gives each category's share of that instant, and "
        "the most that is reserved. Point at the chart for what was allocated or freed; drag to "
        "zoom, double-click for the whole step."
    )


def _notes(step: Step, course: Course) -> list[str]:
    """What the picture does not show by itself."""
    notes = [
        "Reserved is what PyTorch's allocator holds, in use or cached, once training is warm: it "
        "gives nothing back between steps, so its line is often level."
    ]
    setting, limit = step.estimate.setting, limit_of(step)
    shown = max(course.micro_batches)
    if setting.accumulate > shown > 0:
        notes.append(
            f"Of the {setting.accumulate} micro-batches of a step {shown} are shown: the others "
            "repeat one of them."
        )
    if limit is not None and not is_near(course, limit):
        may = f"{format_bytes(limit)}, {limit / max(course.reserved):.1f} times what it needs"
        if limit <= 0:
            may = "nothing, since what lies beside it fills the budget"
        notes.append(f"The limit is not drawn: the allocator may reserve {may}.")
    elif limit is not None:
        notes.append(
            f"The limit is the budget of {format_bytes(step.estimate.budget_bytes or 0)} less what "
            "lies beside PyTorch's allocator (the CUDA context, and NCCL where there is one)."
        )
    return notes


def _by_phase(course: Course) -> Table:
    """The most of each phase."""
    live, rows = course.live, list[list[Cell]]()
    for phase, micro in zip(live.phases, course.micro_batches, strict=True):
        points = slice(phase.start, max(phase.stop, phase.start + 1))
        most = (max(values[points]) for values in (live.total, course.allocated, course.reserved))
        name = phase.name.replace("_", " ") + (f" {micro}" if micro else "")
        rows.append([name, *(Number(size, format_bytes(size)) for size in most)])
    headers = ["Phase", "Alive at most", "Allocated at most", "Reserved at most"]
    return Table(headers, rows, "The most of each phase of the step.")


def stream_text(name: str) -> str:
    """What a stream is called on the page; "" is the one that computes."""
    return name.replace("_", " ") or "computing"


def _by_stream(course: Course) -> Table:
    """Which stream's pool holds what."""
    peak = course.live.peak
    rows: list[list[Cell]] = []
    for name, reserved in course.reserved_of.items():
        live = course.live_of[name]
        sizes = (live[peak], max(live), max(reserved))
        rows.append([stream_text(name), *(Number(size, format_bytes(size)) for size in sizes)])
    said = (
        "What each CUDA stream has: no memory of one stream's pool serves another, so their peaks "
        "add up."
    )
    headers = ["stream", "alive at the peak", "alive at most", "reserved at most"]
    return Table(headers, rows, said)
