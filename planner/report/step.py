"""A predicted step on a page: the answer that a terminal prints, the memory over the step as a
timeline, and tables by phase and by module.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from planner.advice.advice import Advice
from planner.advice.flags import command_of
from planner.core.errors import PlannerError
from planner.core.units import GIB, MIB, format_bytes
from planner.estimation.arguments import NO_TARGET, Target
from planner.estimation.estimate import Estimate
from planner.ledger.ledger import Allocated, Category, Freed, Ledger, Scratch, Tagged
from planner.machine.hardware.overheads import overheads_for, processors_of
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.caching_allocator import UNIT_BYTES, round_request
from planner.memory.profile import category_bytes, live_storages, steady_requests, walk_ledger
from planner.memory.replay import SteadyTrace, trace_steady
from planner.memory.scratch import size_scratch
from planner.report.advice import advice_answer
from planner.report.estimates import estimate_answer, is_shown_as_running, peak_text
from planner.report.page import contents as doc
from planner.report.page import plotting
from planner.report.timing import seconds_and_share
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
_DEPTH, _LEAST_MODULE = 3, 0.01  # of a module in a table: how deep at most, what share at least


@dataclass(frozen=True)
class PhaseSpan:
    """The points of a phase, from `start` up to, not including, `stop`. Where a step has several
    micro-batches, their phases are numbered in `name`."""

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
    phases: tuple[PhaseSpan, ...]
    peak: int


def step_live_bytes(ledger: Ledger) -> LiveBytes:
    """The live bytes of the last optimizer step. Raises PlannerError for a ledger without one."""
    walked = walk_ledger(ledger)
    marks = walked.marks
    steps = [mark.step for _, mark in marks if mark.step >= 0]
    if not steps:
        raise PlannerError(
            "the ledger has no optimizer step.", "Record one with planner.estimate, which runs two."
        )
    last_step = max(steps)
    ends = [(i, mark.phase) for i, mark in marks if mark.step == last_step]
    first = max((i + 1 for i, mark in marks if mark.step < last_step), default=0)
    by_category = category_bytes(ledger.events, first, ends[-1][0])
    total = [sum(point) for point in zip(*by_category.values(), strict=True)]
    moves = [first - 1, *(i for i in walked.move_indices if first <= i < ends[-1][0])]
    stops = [bisect_left(moves, end) for end, _ in ends]
    names = _numbered([name for _, name in ends])
    phases = tuple(map(PhaseSpan, names, [0, *stops], stops))
    return LiveBytes(by_category, total, moves, phases, total.index(max(total)))


def _numbered(phases: Sequence[str]) -> list[str]:
    """The names of a step's phases, as they are shown."""
    numbered = ("forward", "backward") if phases.count("backward") > 1 else ()
    return [
        f"{name} {1 + phases[:n].count('backward')}" if name in numbered else name.replace("_", " ")
        for n, name in enumerate(phases)
    ]


def step_allocator_bytes(
    ledger: Ledger, live: LiveBytes, workspace_bytes: int, config: AllocatorConfig | None = None
) -> SteadyTrace:
    """What the caching allocator gives out and reserves at each point of `live`, which is the last
    step of `ledger`. Workspaces come and go between two points, so each figure is the largest until
    the next point. The other arguments are those of `planner.memory.profile.profile_memory`."""
    walked, requests, start = steady_requests(ledger, workspace_bytes)
    course = trace_steady(requests, start, config, walked.streams, walked.emptied)
    entries = [bisect_right(walked.event_indices, event) - start for event in live.events]
    spans = list(pairwise([*entries, len(course.allocated_bytes)]))
    return SteadyTrace(
        [max(course.allocated_bytes[entry:end]) for entry, end in spans],
        [max(course.reserved_by_stream[entry:end], key=sum) for entry, end in spans],
    )


@dataclass(frozen=True)
class PredictedStep:
    """An estimate with all that it was made from.

    `model_text` is the model as it was typed, and `fields` those of its fields that were typed.
    `largest` is the estimate at the largest batch that fits, and `advice` what
    fits instead: both are None until somebody looks for them.
    """

    estimate: Estimate
    ledger: Ledger
    target: Target = NO_TARGET
    model_text: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    largest: Estimate | None = None
    advice: Advice | None = None

    @property
    def title(self) -> str:
        device = f" on {self.target.gpu.name}" if self.target.gpu is not None else ""
        return f"{self.estimate.model.title}{device}"

    def command(self, name: str) -> str:
        """`planner NAME …` for the same model, setting and device."""
        return command_of(name, self.estimate, self.model_text, self.fields, self.target)


def step_group(step: PredictedStep, key: str, title: str = "") -> doc.Group:
    """All sections of a step. `key` is unique on the page: its charts and anchors begin with it."""
    step = replace(step, ledger=size_scratch(step.ledger, processors_of(step.target.gpu)))
    estimate, timeline = step.estimate, step_timeline(step)
    has_budget = estimate.budget_bytes is not None
    answer = estimate_answer(estimate, lambda _: step.command("advise") if has_budget else "")
    first, *folded = doc.make_sections(answer)
    verdict, *other_parts = first.parts
    command = doc.Copyable(step.command("estimate"), "The same in a terminal")
    parts = [verdict, doc.Facts(_tile_facts(step), "tiles"), *other_parts, command]
    sections = [replace(first, parts=parts)]
    if step.advice is not None:
        save_hint = f"{step.command('advise')} --json > advice.json"
        instead = advice_answer(step.advice, save_hint)
        sections.append(doc.Section("instead", "What fits instead", instead))
    costs = operation_costs(step) if estimate.throughput is not None else ()
    alive = storages_at_peak(step.ledger, timeline.live)
    chart = doc.Chart(
        f"{key}-memory-chart", plotting.new_figure([]), _timeline_caption(step, timeline), 545,
        "timeline", timeline_data(timeline, allocator_limit_bytes(step)), _phase_table(timeline),
    )  # fmt: skip
    parts = [chart, _timeline_notes(step, timeline)]
    sections.append(doc.Section("memory", "Memory over the step", parts))
    extra_parts: dict[str, list[doc.Part]] = {
        "memory-at-the-peak-in-full": [_module_part(alive, costs)],
        "time": _time_chart(costs, key),
    }
    sections += [replace(s, parts=[*s.parts, *extra_parts.get(s.key, ())]) for s in folded]
    if not costs:
        sections.append(doc.Section("time", "Time", [doc.Text(NO_CARD)]))
    return doc.Group(key, title, sections)


def _tile_facts(step: PredictedStep) -> list[tuple[str, str]]:
    """The few figures to see first, beginning with the memory that is needed."""
    estimate = step.estimate
    budget, spare, time = estimate.budget_bytes, estimate.headroom_bytes, estimate.throughput
    limit = f" of {format_bytes(budget)}" if budget is not None else ""
    tiles = [(f"needed{limit}", format_bytes(estimate.device_total_bytes))]
    if time is not None and is_shown_as_running(estimate):
        rate = f"{time.all_images_per_second:,.0f} ±{time.uncertainty:.0%}"
        tiles.append((f"{estimate.unit}/s, predicted", rate))
    if spare is not None:
        tiles.append(("free" if spare >= 0 else "too much", format_bytes(abs(spare))))
    if step.largest is not None:
        doubt = "" if step.largest.fits_surely else ", probably"
        tiles.append((f"largest batch that fits{doubt}", f"{step.largest.setting.batch_size:,}"))
    return tiles


class Move(NamedTuple):
    """An allocation, or a release if `num_bytes` is negative. `category` is what the bytes become,
    or were. `label` and `path` name the operation and the module that requested them."""

    num_bytes: int
    category: Category
    label: str
    path: str


@dataclass(frozen=True)
class MemoryTimeline:
    """The memory over a step of a warm training. Point 0 is the moment before the step, and
    `moves[i]` leads to point i + 1. At each point the allocator has given out `allocated` bytes in
    blocks, and has `reserved` bytes from the driver."""

    live: LiveBytes
    moves: list[Move]
    allocated: list[int]
    reserved: list[int]

    @property
    def scale(self) -> tuple[int, str]:
        return (GIB, "GiB") if max(self.reserved) >= GIB else (MIB, "MiB")


def step_timeline(step: PredictedStep) -> MemoryTimeline:
    """The timeline of a step, as the allocator of its device plays it."""
    ledger, live = step.ledger, step_live_bytes(step.ledger)
    workspace = overheads_for(step.target.gpu, ledger.environment).workspace_bytes
    course = step_allocator_bytes(ledger, live, workspace, step.target.allocator)
    moves = _moves(ledger, live)
    return MemoryTimeline(live, moves, course.allocated_bytes, course.reserved_bytes)


def _moves(ledger: Ledger, live: LiveBytes) -> list[Move]:
    """The allocation or release that leads to each point of `live` but the first."""
    requests: dict[int, Allocated | Scratch] = {}
    categories: dict[int, Category] = {}
    points, moves = set(live.events[1:]), list[Move]()
    for index, event in enumerate(ledger.events):
        if isinstance(event, Allocated | Scratch | Freed):
            storage, sign = event.storage, -1 if isinstance(event, Freed) else 1
            if not isinstance(event, Freed):
                requests[storage], categories[storage] = event, "temporaries"
                request, category = event, categories[storage]
            else:
                request, category = requests.pop(storage), categories.pop(storage)
            newest = storage if index in points else -1
            if index in points:
                size, name = round_request(request.num_bytes), request.label.removeprefix("aten.")
                moves.append(Move(sign * size, category, name, request.path))
        elif type(event) is Tagged and event.storage in categories:
            categories[event.storage] = event.category
            if event.storage == newest:  # tagged before anything else is allocated or freed
                moves[-1] = moves[-1]._replace(category=event.category)
    return moves


def timeline_data(timeline: MemoryTimeline, limit: int | None = None) -> dict[str, Any]:
    """The data of `assets/timeline.js`: every point, in units of 512 B, as differences, which
    compress well (the first entry is the value at point 0). A word is its index in `words`, whose
    texts are shown as they are."""
    live, moves, word_numbers = timeline.live, timeline.moves, dict[str, int]()
    stack = [c for c in STACK if max(live.by_category[c])]  # those that are ever alive
    series: dict[str, Sequence[int]] = {c: live.by_category[c] for c in stack}
    series |= {"allocated": timeline.allocated, "reserved": timeline.reserved}

    def numbers(texts: Iterable[str]) -> list[int]:
        return [word_numbers.setdefault(text, len(word_numbers)) for text in texts]

    return {
        "unit_bytes": UNIT_BYTES,
        "scale_bytes": timeline.scale[0],
        "scale": timeline.scale[1],
        "stack": stack,
        "colours": {c: COLOURS[c] for c in stack}
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
        "phases": [asdict(phase) for phase in live.phases],
        "words": list(map(plotting.plot_text, word_numbers)),
    }


def allocator_limit_bytes(step: PredictedStep) -> int | None:
    """The most that the allocator may reserve: the budget less what is outside the allocator."""
    estimate = step.estimate
    if estimate.budget_bytes is None:
        return None
    return estimate.budget_bytes - (estimate.device_total_bytes - estimate.peak_reserved_bytes)


def _timeline_caption(step: PredictedStep, timeline: MemoryTimeline) -> str:
    return (
        f"Bytes alive during a step of a warm training, by category: at most "
        f"{format_bytes(max(timeline.live.total))}, in {peak_text(step.estimate)}. The legend "
        "gives what each category holds then, and the most that is reserved. Point at the "
        "chart for what was allocated or freed; drag to zoom, double-click for the whole step."
    )


def _timeline_notes(step: PredictedStep, timeline: MemoryTimeline) -> doc.Text:
    """What the timeline does not show by itself."""
    text = (
        "Reserved is what PyTorch's allocator holds, in use or cached, once training is warm: it "
        "gives nothing back between steps, so its line is often level."
    )
    estimate = step.estimate
    if allocator_limit_bytes(step) is not None:
        text += (
            f" {format_bytes(estimate.device_total_bytes - estimate.peak_reserved_bytes)} are "
            "beside it (the CUDA context, NCCL where there is one): with them the step needs "
            f"{format_bytes(estimate.device_total_bytes)}. The limit for torch, drawn where it is "
            "near, is the card's memory without them."
        )
    accumulate = estimate.setting.accumulate
    num_shown = sum(phase.name.startswith("backward") for phase in timeline.live.phases)
    if accumulate > num_shown > 1:
        text += f" Of the {accumulate} micro-batches of a step {num_shown} are shown."
    return doc.Text(text, "note")


def _phase_table(timeline: MemoryTimeline) -> doc.Table:
    """The largest figures of each phase."""
    series = (timeline.live.total, timeline.allocated, timeline.reserved)
    rows: list[list[doc.Cell]] = []
    for phase in timeline.live.phases:
        first = min(phase.start, len(series[0]) - 1)  # an empty phase has the point before it
        points = slice(first, max(phase.stop, first + 1))
        rows.append([phase.name, *(doc.bytes_cell(max(values[points])) for values in series)])
    headers = ["phase", "alive at most", "allocated at most", "reserved at most"]
    return doc.Table(headers, rows, "The most of each phase of the step.")


def storages_at_peak(ledger: Ledger, live: LiveBytes) -> list[tuple[str, Category, int]]:
    """The (module, category, bytes) of each storage at the peak, the oldest first."""
    return [
        (path, category, round_request(num_bytes))
        for num_bytes, category, path, _ in live_storages(ledger, live.events[live.peak])
    ]


def _module_part(alive: Sequence[tuple[str, Category, int]], costs: Sequence[CallPart]) -> doc.Part:
    """The bytes at the peak and the seconds of the step, by module with all that it contains."""
    sizes, seconds = Counter[str](), defaultdict[str, float](float)
    for path, _, size in alive:
        sizes.update(dict.fromkeys(enclosing_modules(path), size))
    for cost in costs:
        for module in enclosing_modules(cost.path):
            seconds[module] += cost.seconds
    all_bytes = sum(size for _, _, size in alive)
    all_seconds = sum(cost.seconds for cost in costs)
    modules = [
        name for name in dict.fromkeys([*sizes, *seconds])
        if sizes[name] >= _LEAST_MODULE * all_bytes or seconds[name] > _LEAST_MODULE * all_seconds
    ]  # fmt: skip
    rows: list[list[doc.Cell]] = [
        [
            name, doc.bytes_cell(sizes[name]), doc.share_cell(sizes[name], all_bytes),
            *(seconds_and_share(seconds[name], all_seconds) if costs else ()),
        ]
        for name in sorted(modules, key=lambda name: re.sub(r"\d+", lambda n: n[0].rjust(4), name))
    ]  # fmt: skip
    headers = ["module", "alive at the peak", "share", *(["time", "share"] if costs else [])]
    caption = "Each module with what lies within it; what has less than 1% of both is left out."
    return doc.Folded("By module", [doc.Table(headers, rows, caption)])


def enclosing_modules(path: str) -> list[str]:
    """The modules that contain `path`, down to _DEPTH: `layers.0` and `layers.0.blocks.1` for
    `layers.0.blocks.1.mlp`. A list of modules (`layers`) is left out, as it computes nothing."""
    modules, prefix = list[str](), ""
    for name in path.split("."):
        prefix = f"{prefix}.{name}" if prefix else name
        if name.isdecimal() and modules:
            modules.pop()
        modules.append(prefix)
    return modules[:_DEPTH] if path else ["in no module"]


def operation_costs(step: PredictedStep) -> tuple[CallPart, ...]:
    """The seconds of the step, by operation and module; empty where no GPU is named."""
    estimate, gpu, link = step.estimate, step.target.gpu, step.target.link
    return call_parts(step.ledger, estimate.model, estimate.setting, gpu, link) if gpu else ()


def _time_chart(costs: Sequence[CallPart], key: str) -> list[doc.Part]:
    """A chart of the step's milliseconds, by phase and kind of operation."""
    if not costs:
        return []
    sums = defaultdict[str, float](float)
    for cost in costs:
        sums[f"{cost.phase}: {cost.kind}"] += 1e3 * cost.seconds
    text = "Milliseconds of the step by phase and kind of operation, what takes most first."
    times = dict(sorted(sums.items(), key=lambda item: -item[1]))
    return [plotting.bar_chart(f"{key}-time", text, times, "milliseconds")]
