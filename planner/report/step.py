"""A predicted step as a page: the answer that a terminal prints, and what can only be drawn."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from planner.advice.advising import Advice
from planner.core.units import GIB, MIB, format_bytes
from planner.estimation.estimate import Estimate, may_reserve
from planner.ledger.ledger import (
    IN_BACKWARD,
    Allocated,
    Category,
    Computed,
    Freed,
    Ledger,
    Marked,
    Scratch,
    Tagged,
)
from planner.machine.hardware import Gpu
from planner.machine.hardware.overheads import overheads_for, processors_of
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.caching_allocator import UNIT_BYTES, rounded
from planner.memory.profile import find_alive
from planner.memory.scratch import on_device
from planner.report.advice import advice_answer
from planner.report.estimates import command_of, estimate_answer
from planner.report.live import STACK, LiveBytes, step_allocator_bytes, step_live_bytes
from planner.report.page.contents import (
    Cell,
    Chart,
    Copyable,
    Facts,
    Folded,
    Group,
    Number,
    Part,
    Section,
    Table,
    Text,
    bytes_cell,
    count_cell,
    sections_of,
    share_cell,
)
from planner.report.page.plotting import (
    BLUE,
    GREEN,
    GREY,
    LEGEND_ABOVE,
    LIMIT,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    bars,
    new_figure,
    plot_text,
)
from planner.report.time import seconds_and_share
from planner.report.verdicts import is_shown_as_running
from planner.throughput.parts import Cost
from planner.throughput.result import datasheet_rates, exchanges_of, step_costs

COLOURS: dict[Category, str] = {
    "parameters": BLUE, "buffers": GREY, "optimizer_state": SKY, "gradients": GREEN,
    "activations": ORANGE, "temporaries": VERMILION,
}  # fmt: skip
NO_CARD = "Time is predicted for a card, and none is named: pass --gpu NAME, as --gpu rtx4090."
STAYS = "beyond the step"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_NUM_STORAGES, _NUM_COSTLIEST = 60, 25
_DEPTH, _LEAST_MODULE = 3, 0.01  # modules of a table: how deep, and which share of either sum
_BAND, _LINE = "rgba(128, 128, 128, 0.11)", "rgba(128, 128, 128, 0.75)"
_ROOM = 1.2  # of what is drawn: the names of phases stand above it


@dataclass(frozen=True)
class Step:
    """One estimate with what it was made of. `link` is what joins several devices, as `planner
    estimate --link` takes it. `memory_bytes` is what was to be fitted into, `said` how the model
    was typed, `fields` what of it was. `largest` is at the largest batch that fits, and `advice`
    is what fits in place of it: both only where they were looked for."""

    estimate: Estimate
    ledger: Ledger
    gpu: Gpu | None = None
    allocator: AllocatorConfig | None = None
    link: str | None = None
    memory_bytes: int | None = None
    said: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    largest: Estimate | None = None
    advice: Advice | None = None

    @property
    def title(self) -> str:
        device = f" on {self.gpu.name}" if self.gpu is not None else ""
        return f"{self.estimate.model.title}{device}"

    def command(self, name: str) -> str:
        """`planner NAME …` for what it is of."""
        return command_of(
            name, self.estimate, self.said, self.fields, self.gpu, self.memory_bytes, self.link,
            self.allocator,
        )  # fmt: skip


def step_group(step: Step, key: str, title: str = "") -> Group:
    """All sections of a step. `key` is unique on the page: charts and anchors begin with it."""
    step = replace(step, ledger=on_device(step.ledger, processors_of(step.gpu)))
    estimate, course = step.estimate, step_course(step)
    has_budget = estimate.budget_bytes is not None
    answer = estimate_answer(estimate, lambda _: step.command("advise") if has_budget else "")
    first, *rest = sections_of(answer)
    again = Copyable(step.command("estimate"), "The same in a terminal")
    parts = [first.parts[0], Facts(_tiles(step), "tiles"), *first.parts[1:], again]
    sections = [replace(first, parts=parts)]
    if step.advice is not None:
        sections.append(Section("instead", "What fits instead", advice_answer(step.advice)))
    costs = costs_of(step) if estimate.throughput is not None else ()
    alive = alive_at_peak(step.ledger, course)
    chart = Chart(
        f"{key}-memory-chart", _figure(step, course), _said(step, course), 545, "timeline",
        timeline_data(course), _by_phase(course),
    )  # fmt: skip
    sections.append(Section("memory", "Memory over the step", [chart, *_notes(step, course)]))
    more: dict[str, list[Part]] = {
        "memory-at-the-peak-in-full": [_modules(alive, costs), _storages(alive)],
        "time": _time_charts(step, costs, key),
    }
    for section in rest:
        if section.key != "largest-tensors":  # the storages say more
            sections.append(replace(section, parts=[*section.parts, *more.get(section.key, ())]))
    if not costs:
        sections.append(Section("time", "Time", [Text(NO_CARD)]))
    return Group(key, title, sections)


def _tiles(step: Step) -> list[tuple[str, str]]:
    """The few to be seen first; what is needed before all."""
    estimate = step.estimate
    budget, spare, time = estimate.budget_bytes, estimate.headroom_bytes, estimate.throughput
    of = f" of {format_bytes(budget)}" if budget is not None else ""
    found = [(f"needed{of}", format_bytes(estimate.device_total_bytes))]
    if time is not None and is_shown_as_running(estimate):
        rate = f"{time.all_images_per_second:,.0f} ±{time.uncertainty:.0%}"
        found.append((f"{estimate.unit}/s, predicted", rate))
    if spare is not None:
        found.append(("free" if spare >= 0 else "too much", format_bytes(abs(spare))))
    if step.largest is not None:
        sure = "" if step.largest.fits_surely else ", probably"
        found.append((f"largest batch that fits{sure}", f"{step.largest.setting.batch_size:,}"))
    return found


class Move(NamedTuple):
    """An allocation or a release: `num_bytes` is below 0 where it is one. `category` is what the
    bytes become, or were. `label` and `path` name the request that they serve, `during` and `at`
    the operation that ran last in the phase and its module, "" before the first; `storage` is the
    number of what they belong to."""

    num_bytes: int
    category: Category
    label: str
    path: str
    during: str
    at: str
    storage: int


@dataclass(frozen=True)
class Course:
    """The steady step. Point 0 is the moment before it, each allocation and release makes one more:
    `moves[i]` leads to point i + 1. Bytes at each point: `allocated` in blocks, `reserved` from the
    driver. `phases` are named as people count them."""

    live: LiveBytes
    moves: list[Move]
    allocated: list[int]
    reserved: list[int]
    phases: list[str]

    @property
    def stack(self) -> list[Category]:
        """The categories of which anything is ever alive, from the bottom up."""
        return [c for c in STACK if max(self.live.by_category[c])]

    @property
    def scale(self) -> tuple[int, str]:
        return (GIB, "GiB") if max(self.reserved) >= GIB else (MIB, "MiB")


def step_course(step: Step) -> Course:
    """The steady step of a subject, with what its device's allocator makes of it."""
    ledger, live = step.ledger, step_live_bytes(step.ledger)
    played = step_allocator_bytes(
        ledger, live, overheads_for(step.gpu, ledger.environment).workspace_bytes, step.allocator,
        may_reserve(step.gpu, step.memory_bytes, step.allocator),
    )  # fmt: skip
    names = [phase.name for phase in live.phases]
    several = names.count("backward") > 1  # micro-batches
    phases = [
        name.replace("_", " ")
        + (f" {1 + names[:n].count('backward')}" * (several and name in ("forward", "backward")))
        for n, name in enumerate(names)
    ]
    moves = list(_moves(ledger, live))
    return Course(live, moves, played.allocated_bytes, played.reserved_bytes, phases)


def _moves(ledger: Ledger, live: LiveBytes) -> Iterator[Move]:
    """What leads to each point but the first."""
    asked: dict[int, Allocated | Scratch] = {}
    categories: dict[int, Category] = {}
    wanted = set(live.events[1:])
    move: Move | None = None
    fresh = -1  # the storage that `move` allocates, whose tags may still come
    during = at = ""
    for index, event in enumerate(ledger.events):
        if type(event) is Computed:
            during, at = event.name, event.path
        elif type(event) is Marked:
            during = at = ""
        elif isinstance(event, Allocated | Scratch | Freed):
            if move is not None:
                yield move
            move, fresh, sign = None, event.storage, 1
            if not isinstance(event, Freed):
                asked[event.storage] = event
                categories[event.storage] = "temporaries"
                during, at = event.label, event.path
                of, category = event, categories[event.storage]
            else:
                of, category, sign = asked.pop(fresh), categories.pop(fresh), -1
            if index in wanted:
                size = sign * rounded(of.num_bytes)
                move = Move(size, category, _name(of.label), of.path, _name(during), at, fresh)
        elif type(event) is Tagged and event.storage in categories:
            categories[event.storage] = event.category
            if event.storage == fresh and move is not None:
                move = move._replace(category=event.category)
    if move is not None:
        yield move


def _name(operation: str) -> str:
    return operation.removeprefix("aten.")


def timeline_data(course: Course) -> dict[str, Any]:
    """What `assets/timeline.js` needs: every point, in units of 512 B and as differences, which
    compress to little (the first entry is the value at point 0); words are numbers of `words`, and
    shown as they are."""
    live, moves, known = course.live, course.moves, dict[str, int]()
    series: dict[str, Sequence[int]] = {c: live.by_category[c] for c in course.stack}
    series |= {"allocated": course.allocated, "reserved": course.reserved}

    def numbers(texts: Iterable[str]) -> list[int]:
        return [known.setdefault(text, len(known)) for text in texts]

    return {
        "unit_bytes": UNIT_BYTES,
        "scale_bytes": course.scale[0],
        "stack": course.stack,
        "series": {
            name: [b // UNIT_BYTES - a // UNIT_BYTES for a, b in pairwise([0, *values])]
            for name, values in series.items()
        },
        "bytes": [move.num_bytes // UNIT_BYTES for move in moves],
        "category": numbers(move.category.replace("_", " ") for move in moves),
        **{n: numbers(getattr(m, n) for m in moves) for n in ("label", "path", "during", "at")},
        "phases": [
            {"name": name, "start": phase.start, "stop": phase.stop}
            for name, phase in zip(course.phases, live.phases, strict=True)
        ],
        "words": list(map(plot_text, known)),
    }


def _figure(step: Step, course: Course) -> Any:
    """Traces without points: the script draws as many as the chart is wide."""
    live, (scale, unit) = course.live, course.scale
    last, top, limit = len(live.total) - 1, max(course.reserved), limit_of(step)

    def line(series: str, name: str, **more: Any) -> dict[str, Any]:
        return {"type": "scatter", "mode": "lines", "x": [], "y": [], "hoverinfo": "skip",
                "meta": {"series": series}, "name": name, **more}  # fmt: skip

    def fixed(name: str, points: list[int], size: int, **more: Any) -> dict[str, Any]:
        return {"type": "scatter", "x": points, "y": [size / scale] * len(points),
                "hoverinfo": "skip", "meta": {"points": points},
                "name": f"{name}, {format_bytes(size)}", **more}  # fmt: skip

    traces = [
        line(
            c, f"{c.replace('_', ' ')}, {format_bytes(live.by_category[c][live.peak])}",
            stackgroup="live", line={"width": 0, "shape": "hv"}, fillcolor=COLOURS[c],
        )
        for c in course.stack
    ]  # fmt: skip
    stroke = {"shape": "hv", "color": PURPLE}
    traces += [
        line("live", "live", showlegend=False, hoverinfo="text",
             line={"shape": "hv", "width": 1, "color": _LINE}),
        line("allocated", "allocated", line={**stroke, "width": 1, "dash": "dot"}),
        line("reserved", f"reserved, {format_bytes(top)}", line={**stroke, "width": 2}),
        fixed("peak", [live.peak], live.peak_bytes, mode="markers", cliponaxis=False, marker={
            "symbol": "triangle-down", "size": 13, "color": "#ffffff",
            "line": {"width": 2, "color": "#000000"},
        }),
    ]  # fmt: skip
    if limit is not None and is_near(course, limit):
        top = max(top, limit)
        dashed = {"width": 2, "color": LIMIT, "dash": "dash"}
        traces.append(fixed("limit", [0, last], limit, mode="lines", line=dashed))
    bands = [
        {"type": "rect", "xref": "x", "yref": "paper", "x0": phase.start, "x1": phase.stop,
         "y0": 0, "y1": 1, "line": {"width": 0}, "layer": "below",
         "fillcolor": _BAND if number % 2 else "rgba(0, 0, 0, 0)"}
        for number, phase in enumerate(live.phases)
    ]  # fmt: skip
    names = [
        {"xref": "x", "yref": "paper", "x": phase.start, "y": 1, "yanchor": "top", "text": name,
         "showarrow": False, "font": {"size": 11}, "visible": False}
        for name, phase in zip(course.phases, live.phases, strict=True)
    ]  # fmt: skip
    xaxis = {
        "title": {"text": "allocations and releases"}, "range": [0, last], "showspikes": True,
        "spikemode": "across", "spikethickness": 1, "spikedash": "solid", "spikecolor": _LINE,
        "spikesnap": "hovered data", "showgrid": False, "hoverformat": ",.0f", "tickformat": ",d",
        "minallowed": 0, "maxallowed": last,
    }  # fmt: skip
    yaxis = {"range": [0, _ROOM * top / scale], "fixedrange": True,
             "title": {"text": f"{unit} of memory"}}  # fmt: skip
    return new_figure(
        traces, hovermode="x", hoverdistance=-1, dragmode="zoom", xaxis=xaxis, yaxis=yaxis,
        legend=LEGEND_ABOVE, shapes=bands, annotations=names,
    )  # fmt: skip


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
    return (
        f"Bytes alive during a step of a warm training, by category: at most "
        f"{format_bytes(course.live.peak_bytes)}, in {step.estimate.peak_at}. The legend "
        "gives each category's share of that instant, and the most that is reserved. Point at the "
        "chart for what was allocated or freed; drag to zoom, double-click for the whole step."
    )


def _notes(step: Step, course: Course) -> list[Part]:
    """What the picture does not show by itself."""
    notes = [
        "Reserved is what PyTorch's allocator holds, in use or cached, once training is warm: it "
        "gives nothing back between steps, so its line is often level."
    ]
    accumulate, limit = step.estimate.setting.accumulate, limit_of(step)
    shown = sum(name.startswith("backward") for name in course.phases)
    if accumulate > shown > 1:
        notes.append(
            f"Of the {accumulate} micro-batches of a step {shown} are shown: the others repeat one "
            "of them."
        )
    if limit is not None:
        drawn = "" if is_near(course, limit) else ", and is not drawn"
        notes.append(
            f"PyTorch's allocator may reserve {format_bytes(max(limit, 0))}{drawn}: the budget "
            "less what lies beside it (the CUDA context, and NCCL where there is one)."
        )
    return [Text(note, "note") for note in notes]


def _by_phase(course: Course) -> Table:
    """The most of each phase."""
    rows: list[list[Cell]] = []
    for name, phase in zip(course.phases, course.live.phases, strict=True):
        first = min(phase.start, len(course.live.total) - 1)  # an empty phase has the one before it
        points = slice(first, max(phase.stop, first + 1))
        all_series = (course.live.total, course.allocated, course.reserved)
        rows.append([name, *(bytes_cell(max(values[points])) for values in all_series)])
    headers = ["phase", "alive at most", "allocated at most", "reserved at most"]
    return Table(headers, rows, "The most of each phase of the step.")


class Alive(NamedTuple):
    """A storage at the peak. `until` is when it is released: `backward of head (mm)`, or STAYS."""

    num_bytes: int
    category: Category
    label: str
    path: str
    until: str


def alive_at_peak(ledger: Ledger, course: Course) -> list[Alive]:
    """What is alive at the peak, oldest first."""
    live, until = course.live, dict[int, str]()
    for phase in live.phases:
        for point in range(max(phase.start, live.peak + 1), phase.stop):
            move = course.moves[point - 1]
            if move.num_bytes < 0:
                label = f" ({move.during})" if move.during else ""
                during = f"{phase.name} of {move.at}{label}" if move.at else f"{phase.name}{label}"
                until[move.storage] = IN_BACKWARD if move.at == IN_BACKWARD else during
    return [
        Alive(rounded(of.num_bytes), category, _name(of.label), of.path,
              until.get(of.storage, STAYS))
        for of, category in find_alive(ledger.events, live.events[live.peak])
    ]  # fmt: skip


def _storages(alive: Sequence[Alive]) -> Part:
    """Equal ones together, what takes most in all first."""
    counts = Counter(one._replace(path=starred(one.path), until=starred(one.until))
                     for one in alive)  # fmt: skip
    groups = sorted(counts, key=lambda one: -one.num_bytes * counts[one])[:_NUM_STORAGES]
    total, sizes = sum(one.num_bytes for one in alive), [o.num_bytes * counts[o] for o in groups]
    rows: list[list[Cell]] = [
        [
            f"{one.path} ({one.label})" if one.path else one.label,
            one.category.replace("_", " "),
            Number(one.num_bytes, f"{counts[one]:,} × {format_bytes(one.num_bytes)}"),
            Number(size, f"{format_bytes(size)}, {size / total:.1%}"),
            one.until,
        ]
        for one, size in zip(groups, sizes, strict=True)
    ]
    caption = (
        f"The largest storages at the peak, equal ones together (a star stands for any number): "
        f"{sum(sizes) / total:.1%} of its {format_bytes(total)}. An activation is held for the "
        "backward that releases it."
    )
    headers = ["asked for by", "category", "each", "together", "held until"]
    return Folded("The largest storages", [Table(headers, rows, caption)], printed=False)


def starred(path: str) -> str:
    """`layers.*.blocks.*.mlp` of `layers.2.blocks.0.mlp`."""
    return _NUMBER.sub("*", path)


def _modules(alive: Sequence[Alive], costs: Sequence[Cost]) -> Part:
    """Bytes at the peak and seconds of the step, by module; a module's are those within it too."""
    held, spent = Counter[str](), Counter[str]()
    for one in alive:
        held.update(dict.fromkeys(modules_of(one.path), one.num_bytes))
    for cost in costs:
        for module in modules_of(cost.path):
            spent[module] += cost.seconds  # type: ignore[assignment]
    num_bytes = sum(one.num_bytes for one in alive)
    seconds = sum(cost.seconds for cost in costs)
    named = [
        name for name in dict.fromkeys([*held, *spent])
        if held[name] >= _LEAST_MODULE * num_bytes or spent[name] > _LEAST_MODULE * seconds
    ]  # fmt: skip
    rows: list[list[Cell]] = [
        [
            name, bytes_cell(held[name]), share_cell(held[name], num_bytes),
            *(seconds_and_share(spent[name], seconds) if costs else ()),
        ]
        for name in sorted(named, key=lambda name: [_padded(part) for part in name.split(".")])
    ]  # fmt: skip
    headers = ["module", "alive at the peak", "share", *(["time", "share"] if costs else [])]
    caption = "Each module with what lies within it; what has less than 1% of both is left out."
    return Folded("By module", [Table(headers, rows, caption)])


def modules_of(path: str) -> list[str]:
    """`layers.0` and `layers.0.blocks.1` of `layers.0.blocks.1.mlp`, and so on down to _DEPTH: a
    list of modules computes nothing itself."""
    found, where = list[str](), ""
    for name in path.split("."):
        where = f"{where}.{name}" if where else name
        if name.isdecimal() and found:
            found.pop()
        found.append(where)
    return found[:_DEPTH] if path else ["in no module"]


def _padded(name: str) -> str:
    return name.rjust(6) if name.isdecimal() else name


def costs_of(step: Step) -> tuple[Cost, ...]:
    """The seconds of the estimate's step, by operation and module."""
    setting, rates = step.estimate.setting, datasheet_rates(step.gpu, step.estimate.model)
    exchanges = exchanges_of(step.ledger, setting, step.gpu, step.link)
    return step_costs(step.ledger, setting, rates, exchanges)


def _time_charts(step: Step, costs: Sequence[Cost], key: str) -> list[Part]:
    """What takes most, by phase and kind; the costliest operations, all modules together."""
    time = step.estimate.throughput
    if time is None or not costs:
        return []
    sums, seconds = Counter[str](), Counter[tuple[str, str, str]]()
    modules: dict[tuple[str, str, str], set[str]] = {}
    for cost in costs:
        sums[f"{cost.phase}: {cost.kind}"] += 1e3 * cost.seconds  # type: ignore[assignment]
        named = _name(cost.name) or cost.kind, cost.phase, cost.bound
        seconds[named] += cost.seconds  # type: ignore[assignment]
        modules.setdefault(named, set()).add(cost.path)
    said = "Milliseconds of the step by phase and kind of operation, what takes most first."
    chart = bars(f"{key}-time", said, dict(sums.most_common()), "milliseconds")
    most = seconds.most_common(_NUM_COSTLIEST)
    rows: list[list[Cell]] = [
        [*named, count_cell(len(modules[named])),
         *seconds_and_share(spent, time.step_seconds)]
        for named, spent in most
    ]  # fmt: skip
    caption = f"The {len(most)} costliest of {len(seconds)} operations, all modules together."
    headers = ["operation", "phase", "limited by", "modules", "time", "share"]
    costliest = Folded("The costliest operations", [Table(headers, rows, caption)], printed=False)
    return [chart, costliest]
