"""A predicted step as a page: the answer that a terminal prints, and what can only be drawn."""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from planner.advice.advising import Advice
from planner.advice.flags import command_of
from planner.core.errors import PlannerError
from planner.core.units import GIB, MIB, format_bytes
from planner.estimation.estimate import Estimate
from planner.ledger.ledger import Allocated, Category, Freed, Ledger, Scratch, Tagged
from planner.machine.hardware import Gpu
from planner.machine.hardware.overheads import overheads_for, processors_of
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.caching_allocator import UNIT_BYTES, rounded
from planner.memory.profile import alive_at, category_bytes, steady_requests, walk_ledger
from planner.memory.replay import SteadyCourse, steady_course
from planner.memory.scratch import on_device
from planner.report.advice import advice_answer
from planner.report.estimates import estimate_answer, is_shown_as_running, peak_text
from planner.report.page import contents as doc
from planner.report.page import plotting
from planner.report.time import seconds_and_share
from planner.throughput.prediction import call_parts
from planner.throughput.result import CallPart

# From the bottom of a picture to its top: what stays, then what comes and goes.
STACK: tuple[Category, ...] = (
    "parameters", "buffers", "optimizer_state", "gradients", "activations", "temporaries",
)  # fmt: skip
COLOURS: dict[Category, str] = {
    "parameters": plotting.BLUE, "buffers": plotting.GREY,
    "optimizer_state": plotting.SKY, "gradients": plotting.GREEN,
    "activations": plotting.ORANGE, "temporaries": plotting.VERMILION,
}  # fmt: skip
NO_CARD = "Time is predicted for a card, and none is named: pass --gpu NAME, as --gpu rtx4090."
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_NUM_STORAGES, _NUM_COSTLIEST = 60, 25
_DEPTH, _LEAST_MODULE = 3, 0.01  # modules of a table: how deep, and which share of either sum
_BAND, _LINE = "rgba(128, 128, 128, 0.11)", "rgba(128, 128, 128, 0.75)"


@dataclass(frozen=True)
class Phase:
    """A stretch of points, from `start` up to, not including, `stop`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class LiveBytes:
    """Live bytes after each allocation and release of one optimizer step, in order.

    `by_category[c][i]` are the bytes of category c at point i, `total[i]` their sum; point 0 is the
    moment before the step. `events[i]` is the index of the event behind point i, and of the one
    before the step at point 0. `peak` is the first point with the most.
    """

    by_category: dict[Category, list[int]]
    total: list[int]
    events: list[int]
    phases: tuple[Phase, ...]
    peak: int

    @property
    def peak_bytes(self) -> int:
        return self.total[self.peak]


def step_live_bytes(ledger: Ledger) -> LiveBytes:
    """What happens in the last optimizer step. Raises PlannerError for a ledger without any."""
    walked = walk_ledger(ledger)
    marks = walked.marks
    steps = [mark.step for _, mark in marks if mark.step >= 0]
    if not steps:
        raise PlannerError(
            "the ledger has no optimizer step.", "Record one with planner.estimate, which runs two."
        )
    wanted = max(steps)
    ends = [(i, mark.phase) for i, mark in marks if mark.step == wanted]
    first = max((i + 1 for i, mark in marks if mark.step < wanted), default=0)
    by_category = category_bytes(ledger.events, first, ends[-1][0])
    total = [sum(point) for point in zip(*by_category.values(), strict=True)]
    moves = [first - 1, *(i for i in walked.moves if first <= i < ends[-1][0])]
    stops = [bisect_left(moves, end) for end, _ in ends]
    phases = tuple(
        Phase(name, start, stop)
        for (_, name), start, stop in zip(ends, [0, *stops], stops, strict=False)
    )
    return LiveBytes(by_category, total, moves, phases, total.index(max(total)))


def step_allocator_bytes(
    ledger: Ledger, live: LiveBytes, workspace_bytes: int, config: AllocatorConfig | None = None
) -> SteadyCourse:
    """The most that the caching allocator has given out and reserved from each point of `live`, the
    last step of `ledger`, until the next: workspaces come and go in between. The arguments are
    those of `planner.memory.profile.profile_memory`."""
    walked, requests, start = steady_requests(ledger, workspace_bytes)
    played = steady_course(requests, start, config, walked.streams, walked.emptied)
    entries = [bisect_right(walked.events, event) - start for event in live.events]
    spans = list(pairwise([*entries, len(played.allocated_bytes)]))
    return SteadyCourse(
        [max(played.allocated_bytes[entry:end]) for entry, end in spans],
        [max(played.reserved_by_stream[entry:end], key=sum) for entry, end in spans],
    )


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


def step_group(step: Step, key: str, title: str = "") -> doc.Group:
    """All sections of a step. `key` is unique on the page: charts and anchors begin with it."""
    step = replace(step, ledger=on_device(step.ledger, processors_of(step.gpu)))
    estimate, course = step.estimate, step_course(step)
    has_budget = estimate.budget_bytes is not None
    answer = estimate_answer(estimate, lambda _: step.command("advise") if has_budget else "")
    first, *rest = doc.sections_of(answer)
    again = doc.Copyable(step.command("estimate"), "The same in a terminal")
    parts = [first.parts[0], doc.Facts(_tiles(step), "tiles"), *first.parts[1:], again]
    sections = [replace(first, parts=parts)]
    if step.advice is not None:
        asked = f"{step.command('advise')} --json > advice.json"
        parts = [*advice_answer(step.advice, asked)]
        sections.append(doc.Section("instead", "What fits instead", parts))
    costs = costs_of(step) if estimate.throughput is not None else ()
    alive = alive_at_peak(step.ledger, course.live)
    chart = doc.Chart(
        f"{key}-memory-chart", plotting.new_figure([]), _said(step, course), 545, "timeline",
        timeline_data(course, limit_of(step)), _by_phase(course),
    )  # fmt: skip
    sections.append(doc.Section("memory", "Memory over the step", [chart, *_notes(step, course)]))
    more: dict[str, list[doc.Part]] = {
        "memory-at-the-peak-in-full": [_modules(alive, costs)],
        "time": _time_chart(costs, key),
    }
    sections += [replace(s, parts=[*s.parts, *more.get(s.key, ())]) for s in rest]
    if not costs:
        sections.append(doc.Section("time", "Time", [doc.Text(NO_CARD)]))
    return doc.Group(key, title, sections)


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
    bytes become, or were. `label` and `path` name the request that they serve."""

    num_bytes: int
    category: Category
    label: str
    path: str


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
    workspace = overheads_for(step.gpu, ledger.environment).workspace_bytes
    played = step_allocator_bytes(ledger, live, workspace, step.allocator)
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
    for index, event in enumerate(ledger.events):
        if isinstance(event, Allocated | Scratch | Freed):
            if move is not None:
                yield move
            move, fresh, sign = None, event.storage, 1
            if not isinstance(event, Freed):
                asked[event.storage] = event
                categories[event.storage] = "temporaries"
                of, category = event, categories[event.storage]
            else:
                of, category, sign = asked.pop(fresh), categories.pop(fresh), -1
            if index in wanted:
                size = sign * rounded(of.num_bytes)
                move = Move(size, category, _name(of.label), of.path)
        elif type(event) is Tagged and event.storage in categories:
            categories[event.storage] = event.category
            if event.storage == fresh and move is not None:
                move = move._replace(category=event.category)
    if move is not None:
        yield move


def _name(operation: str) -> str:
    return operation.removeprefix("aten.")


def timeline_data(course: Course, limit: int | None = None) -> dict[str, Any]:
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
        "scale": course.scale[1],
        "stack": course.stack,
        "colours": {c: COLOURS[c] for c in course.stack}
        | {"allocator": plotting.PURPLE, "limit": plotting.LIMIT},
        "peak": live.peak,
        "limit_bytes": limit,
        "series": {
            name: [b // UNIT_BYTES - a // UNIT_BYTES for a, b in pairwise([0, *values])]
            for name, values in series.items()
        },
        "bytes": [move.num_bytes // UNIT_BYTES for move in moves],
        "category": numbers(move.category.replace("_", " ") for move in moves),
        "label": numbers(move.label for move in moves),
        "path": numbers(move.path for move in moves),
        "phases": [
            {"name": name, "start": phase.start, "stop": phase.stop}
            for name, phase in zip(course.phases, live.phases, strict=True)
        ],
        "words": list(map(plotting.plot_text, known)),
    }


def limit_of(step: Step) -> int | None:
    """What the allocator may reserve at most: the budget less what lies beside it."""
    estimate = step.estimate
    if estimate.budget_bytes is None:
        return None
    return estimate.budget_bytes - (estimate.device_total_bytes - estimate.peak_reserved_bytes)


def _said(step: Step, course: Course) -> str:
    return (
        f"Bytes alive during a step of a warm training, by category: at most "
        f"{format_bytes(course.live.peak_bytes)}, in {peak_text(step.estimate)}. The legend "
        "gives what each category holds then, and the most that is reserved. Point at the "
        "chart for what was allocated or freed; drag to zoom, double-click for the whole step."
    )


def _notes(step: Step, course: Course) -> list[doc.Part]:
    """What the picture does not show by itself."""
    said = (
        "Reserved is what PyTorch's allocator holds, in use or cached, once training is warm: it "
        "gives nothing back between steps, so its line is often level."
    )
    estimate = step.estimate
    if limit_of(step) is not None:
        said += (
            f" {format_bytes(estimate.device_total_bytes - estimate.peak_reserved_bytes)} are "
            "beside it (the CUDA context, NCCL where there is one): with them the step needs "
            f"{format_bytes(estimate.device_total_bytes)}. The limit for torch, drawn where it is "
            "near, is the card's memory without them."
        )
    accumulate, shown = estimate.setting.accumulate, " ".join(course.phases).count("backward")
    if accumulate > shown > 1:
        said += f" Of the {accumulate} micro-batches of a step {shown} are shown."
    return [doc.Text(said, "note")]


def _by_phase(course: Course) -> doc.Table:
    """The most of each phase."""
    rows: list[list[doc.Cell]] = []
    for name, phase in zip(course.phases, course.live.phases, strict=True):
        first = min(phase.start, len(course.live.total) - 1)  # an empty phase has the one before it
        points = slice(first, max(phase.stop, first + 1))
        all_series = (course.live.total, course.allocated, course.reserved)
        rows.append([name, *(doc.bytes_cell(max(values[points])) for values in all_series)])
    headers = ["phase", "alive at most", "allocated at most", "reserved at most"]
    return doc.Table(headers, rows, "The most of each phase of the step.")


def alive_at_peak(ledger: Ledger, live: LiveBytes) -> list[tuple[str, Category, int]]:
    """(module, category, bytes) of each storage at the peak, oldest first."""
    return [
        (path, category, rounded(num_bytes))
        for num_bytes, category, path, _ in alive_at(ledger, live.events[live.peak])
    ]


def _modules(alive: Sequence[tuple[str, Category, int]], costs: Sequence[CallPart]) -> doc.Part:
    """Bytes at the peak and seconds of the step, by module; a module's are those within it too."""
    held, spent = Counter[str](), Counter[str]()
    for path, _, size in alive:
        held.update(dict.fromkeys(modules_of(path), size))
    for cost in costs:
        for module in modules_of(cost.path):
            spent[module] += cost.seconds  # type: ignore[assignment]
    num_bytes = sum(size for _, _, size in alive)
    seconds = sum(cost.seconds for cost in costs)
    named = [
        name for name in dict.fromkeys([*held, *spent])
        if held[name] >= _LEAST_MODULE * num_bytes or spent[name] > _LEAST_MODULE * seconds
    ]  # fmt: skip
    rows: list[list[doc.Cell]] = [
        [
            name, doc.bytes_cell(held[name]), doc.share_cell(held[name], num_bytes),
            *(seconds_and_share(spent[name], seconds) if costs else ()),
        ]
        for name in sorted(named, key=lambda name: re.sub(r"\d+", lambda n: n[0].rjust(4), name))
    ]  # fmt: skip
    headers = ["module", "alive at the peak", "share", *(["time", "share"] if costs else [])]
    caption = "Each module with what lies within it; what has less than 1% of both is left out."
    return doc.Folded("By module", [doc.Table(headers, rows, caption)])


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


def costs_of(step: Step) -> tuple[CallPart, ...]:
    """The seconds of the estimate's step, by operation and module; none where no GPU is named."""
    found, gpu = step.estimate, step.gpu
    return call_parts(step.ledger, found.model, found.setting, gpu, step.link) if gpu else ()


def _time_chart(costs: Sequence[CallPart], key: str) -> list[doc.Part]:
    """What takes most, by phase and kind."""
    sums = Counter[str]()
    for cost in costs:
        sums[f"{cost.phase}: {cost.kind}"] += 1e3 * cost.seconds  # type: ignore[assignment]
    said = "Milliseconds of the step by phase and kind of operation, what takes most first."
    milliseconds = dict(sums.most_common())
    return [plotting.bars(f"{key}-time", said, milliseconds, "milliseconds")] if costs else []
