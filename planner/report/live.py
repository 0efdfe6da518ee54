"""A ledger's live bytes over one optimizer step, by category: what the timelines draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import PlannerError
from planner.ledger import CATEGORIES, Allocated, Category, Freed, Ledger, Marked, Tagged

MIN_BLOCK_BYTES = 512  # the caching allocator's; live bytes count requests rounded up to it


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
    moment before the step. `peak` is the first point with the most; `peak_phase`, `peak_label` and
    `peak_path` say what was asking for memory then.
    """

    by_category: dict[Category, list[int]]
    total: list[int]
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


def step_live_bytes(ledger: Ledger, step: int | None = None) -> LiveBytes:
    """Walk a ledger and keep what happens in optimizer step `step` (the last one by default).

    Raises PlannerError for a ledger with no such step.
    """
    marks = [(i, e) for i, e in enumerate(ledger.events) if isinstance(e, Marked)]
    steps = [mark.step for _, mark in marks if mark.step >= 0]
    if not steps or (step is not None and step not in steps):
        raise PlannerError(
            f"the ledger has no optimizer step {step if step is not None else 'at all'}.",
            "Record one with planner.estimate, which runs two.",
        )
    wanted = max(steps) if step is None else step
    ends = [(i, mark.phase) for i, mark in marks if mark.step == wanted]
    before = [i for i, mark in marks if mark.step < wanted]
    return _Walk().run(ledger, first=before[-1] + 1 if before else 0, ends=ends)


class _Walk:
    """Live storages so far, and the points kept."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, Category]] = {}
        self.now: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.points: dict[Category, list[int]] = {c: [] for c in CATEGORIES}
        self.total: list[int] = []
        self.sources: list[Allocated | None] = []

    def run(self, ledger: Ledger, first: int, ends: Sequence[tuple[int, str]]) -> LiveBytes:
        for event in ledger.events[:first]:
            self.take(event)
        self.keep(None)
        phases = []
        start = first
        for end, name in ends:
            num_before = len(self.total)
            for event in ledger.events[start:end]:
                if self.take(event):
                    self.keep(event if isinstance(event, Allocated) else None)
                elif isinstance(event, Tagged):
                    self.recount()
            phases.append(Phase(name, num_before, len(self.total)))
            start = end + 1
        phases[0] = Phase(phases[0].name, 0, phases[0].stop)
        peak = self.total.index(max(self.total))
        source = self.sources[peak]
        return LiveBytes(
            by_category=self.points,
            total=self.total,
            phases=tuple(phases),
            peak=peak,
            peak_phase=next(p.name for p in phases if p.start <= peak < p.stop),
            peak_label=source.label if source else "",
            peak_path=source.path if source else "",
        )

    def take(self, event: object) -> bool:
        """Whether the event moved memory."""
        if isinstance(event, Allocated):
            num_bytes = -(-event.num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
            self.held[event.storage] = num_bytes, "temporaries"
            self.now["temporaries"] += num_bytes
        elif isinstance(event, Freed):
            num_bytes, category = self.held.pop(event.storage)
            self.now[category] -= num_bytes
        elif isinstance(event, Tagged) and event.storage in self.held:
            num_bytes, category = self.held[event.storage]
            self.now[category] -= num_bytes
            self.now[event.category] += num_bytes
            self.held[event.storage] = num_bytes, event.category
            return False
        else:
            return False
        return True

    def recount(self) -> None:
        """Apply a tag that follows its allocation to the point just recorded."""
        for category, num_bytes in self.now.items():
            self.points[category][-1] = num_bytes

    def keep(self, source: Allocated | None) -> None:
        for category, num_bytes in self.now.items():
            self.points[category].append(num_bytes)
        self.total.append(sum(self.now.values()))
        self.sources.append(source)
