"""A ledger's memory over one optimizer step: what is alive, by category, and what the allocator
makes of it. All timelines draw this, that of a terminal here."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

from planner.core.errors import PlannerError
from planner.core.units import GIB, MIB, format_bytes
from planner.ledger.ledger import Allocated, Category, Ledger
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.profile import category_bytes, steady_requests, walk_ledger
from planner.memory.replay import SteadyCourse, steady_course
from planner.report.text import wrapped

# From the bottom of a picture to its top: what stays, then what comes and goes.
STACK: tuple[Category, ...] = (
    "parameters", "buffers", "optimizer_state", "gradients", "activations", "temporaries",
)  # fmt: skip

GLYPHS: dict[Category, str] = {
    "parameters": "█", "buffers": "▪", "optimizer_state": "▓", "gradients": "▒",
    "activations": "░", "temporaries": "•",
}  # fmt: skip


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
    before the step at point 0. `peak` is the first point with the most; `peak_phase`,
    `peak_label` and `peak_path` say what was asking for memory then.
    """

    by_category: dict[Category, list[int]]
    total: list[int]
    events: list[int]
    phases: tuple[Phase, ...]
    peak: int
    peak_phase: str
    peak_label: str
    peak_path: str

    @property
    def peak_bytes(self) -> int:
        return self.total[self.peak]

    @property
    def peak_at(self) -> str:
        """The peak's instant in the words of an estimate: `backward of layers.0.mlp.fc1 (mm)`."""
        where = f"{self.peak_phase} of {self.peak_path}" if self.peak_path else self.peak_phase
        label = self.peak_label.removeprefix("aten.")
        return f"{where} ({label})" if label else where

    def thin(self, num_columns: int) -> tuple[list[int], list[int]]:
        """At most `num_columns` points that keep every column's maximum, the peak among them, and
        for each the first point of its column."""
        count = len(self.total)
        bounds = sorted({count * c // num_columns for c in range(num_columns)})
        chosen = [
            max(range(start, stop), key=self.total.__getitem__)
            for start, stop in zip(bounds, [*bounds[1:], count], strict=True)
        ]
        return chosen, bounds


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
    peak = total.index(max(total))
    source = ledger.events[moves[peak]] if peak else None
    label, path = ("", "") if not isinstance(source, Allocated) else (source.label, source.path)
    return LiveBytes(
        by_category=by_category,
        total=total,
        events=moves,
        phases=phases,
        peak=peak,
        peak_phase=next(p.name for p in phases if p.start <= peak < p.stop),
        peak_label=label,
        peak_path=path,
    )


def step_allocator_bytes(
    ledger: Ledger,
    live: LiveBytes,
    workspace_bytes: int,
    config: AllocatorConfig | None = None,
    allowed_bytes: int | None = None,
) -> SteadyCourse:
    """The most that the caching allocator has given out and reserved from each point of `live`, the
    last step of `ledger`, until the next: workspaces come and go in between. The arguments are
    those of `planner.memory.profile.profile_memory`."""
    walked, requests, start = steady_requests(ledger, workspace_bytes)
    played = steady_course(requests, start, config, allowed_bytes, walked.streams, walked.emptied)
    entries = [bisect_right(walked.events, event) - start for event in live.events]
    spans = list(pairwise([*entries, len(played.allocated_bytes)]))
    return SteadyCourse(
        [max(played.allocated_bytes[entry:end]) for entry, end in spans],
        [max(played.reserved_by_stream[entry:end], key=sum) for entry, end in spans],
    )


def timeline_text(ledger: Ledger, width: int = 100, height: int = 20) -> str:
    """The steady step as `height` rows of cells, no line wider than `width` characters. A cell
    shows the category that is in its middle."""
    live = step_live_bytes(ledger)
    points, bounds = live.thin(max(width - 9, 10))
    unit, name = (GIB, "GiB") if live.peak_bytes >= GIB else (MIB, "MiB")
    lines = [" " * (9 + points.index(live.peak)) + "▼"]
    for row in range(height, 0, -1):
        has_label = row in (height, 1) or row % 5 == 0
        label = f"{live.peak_bytes * row / height / unit:.3g}" if has_label else ""
        middle = live.peak_bytes * (row - 0.5) / height
        lines.append(f"{label:>7} │" + "".join(_glyph(live, point, middle) for point in points))
    lines.append(f"{name:>7} └{'─' * len(points)}")
    marks = ["" for _ in bounds]
    for phase in live.phases:
        columns = [c for c, first in enumerate(bounds) if phase.start <= first < phase.stop]
        for column, letter in zip(columns, f"│{phase.name}".ljust(len(columns)), strict=False):
            marks[column] = letter
    lines.append(" " * 9 + "".join(mark or " " for mark in marks))
    entries = [
        f"{GLYPHS[c]} {c.replace('_', ' ')} {format_bytes(live.by_category[c][live.peak])}"
        for c in STACK if max(live.by_category[c])
    ]  # fmt: skip
    said = f"peak {format_bytes(live.peak_bytes)}: {live.peak_at}; then {', '.join(entries)}"
    return "\n".join([*(line.rstrip() for line in lines), wrapped(said)])


def _glyph(live: LiveBytes, point: int, size: float) -> str:
    base = 0
    for category in STACK:
        base += live.by_category[category][point]
        if size < base:
            return GLYPHS[category]
    return " "
