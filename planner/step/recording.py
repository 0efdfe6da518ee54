"""A recorded step at any batch size: its events are the same, its sizes affine in the batch.

Two recordings at different batches (2 or more) give every size as fixed + batch * per image. At
batch 1 dimensions of size 1 change which copies happen (FACTS §11), so it is recorded by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planner.step.ledger import (
    Allocated,
    Category,
    Computed,
    Event,
    Freed,
    Ledger,
    Marked,
    Tagged,
)

Record = Callable[[int], Ledger]  # the ledger at a batch size


@dataclass
class Recorder:
    """Ledgers of one model and setting at any batch, from as few recordings as possible.

    One batch is recorded as it is; the second one asked for makes the line through both, from which
    all others are read.
    """

    record: Record
    known: dict[int, Ledger] = field(default_factory=dict)
    line: Line | None = None

    def ledger(self, batch_size: int) -> Ledger:
        """All events at `batch_size`."""
        if batch_size in self.known:
            return self.known[batch_size]
        if batch_size > 1 and self.line is None:
            others = [b for b in self.known if b > 1]
            if others:
                second = self.record(2 if others[0] != 2 else 3)
                self.line = Line.through(self.known[others[0]], second)
        if batch_size > 1 and self.line is not None:
            return self.line.ledger(batch_size)
        self.known[batch_size] = self.record(batch_size)
        return self.known[batch_size]


@dataclass(frozen=True)
class Line:
    """Each allocation and operation as (fixed, per image): bytes, and FLOPs for operations."""

    events: tuple[Event, ...]
    slopes: tuple[tuple[int, int, int], ...]
    batch_size: int
    num_parameters: int

    @classmethod
    def through(cls, first: Ledger, second: Ledger) -> Line:
        """The line through two recordings. AssertionError where their events differ in kind."""
        assert len(first.events) == len(second.events), "a step's events depend on the batch"
        span = second.batch_size - first.batch_size
        slopes = []
        for index, (a, b) in enumerate(zip(first.events, second.events, strict=True)):
            if isinstance(a, Allocated) and isinstance(b, Allocated):
                slopes.append((index, _slope(a.num_bytes, b.num_bytes, span), 0))
            elif isinstance(a, Computed) and isinstance(b, Computed):
                per_image = _slope(a.num_bytes, b.num_bytes, span)
                slopes.append((index, per_image, _slope(a.flops, b.flops, span)))
            else:
                assert type(a) is type(b), "a step's events depend on the batch"
        changing = tuple(entry for entry in slopes if entry[1] or entry[2])
        return cls(first.events, changing, first.batch_size, first.num_parameters)

    def ledger(self, batch_size: int) -> Ledger:
        """The ledger at another batch of 2 or more."""
        more = batch_size - self.batch_size
        events = list(self.events)
        for index, num_bytes, flops in self.slopes:
            event = events[index]
            if isinstance(event, Allocated):
                events[index] = Allocated(
                    event.storage, event.num_bytes + more * num_bytes, event.label, event.path
                )
            elif isinstance(event, Computed):
                events[index] = event._replace(
                    num_bytes=event.num_bytes + more * num_bytes, flops=event.flops + more * flops
                )
        return Ledger(tuple(events), batch_size, self.num_parameters)


def _slope(a: int, b: int, span: int) -> int:
    slope, rest = divmod(b - a, span)
    assert rest == 0, "a size is not affine in the batch"
    return slope


@dataclass(frozen=True)
class Instant:
    """What is alive at one event: bytes by category, and the largest storages.

    `phase` and `micro_batch` (counted from 1) say when; `label` and `path` name the request that
    was served last.
    """

    event_index: int
    phase: str
    micro_batch: int
    label: str
    path: str
    live_bytes: int
    by_category: dict[Category, int]
    largest: tuple[tuple[str, str, int], ...]


def rounded(num_bytes: int) -> int:
    """A request as the caching allocator rounds it: up to 512 B."""
    return (num_bytes + 511) & ~511


@dataclass(frozen=True)
class Profile:
    """Live bytes of the steady step, each request rounded to 512 B.

    `ends` are (phase, live bytes at its end) in order, of the last step recorded; `before_step` is
    alive as it begins; `peak_index` the event at which the most was alive.
    """

    before_step: int
    ends: tuple[tuple[str, int], ...]
    peak_bytes: int
    peak_index: int
    steady_from: int

    @property
    def saved_bytes(self) -> int:
        """Held between the first forward's end and its backward: growth since the step began."""
        return self.ends[0][1] - self.before_step


def profile(ledger: Ledger) -> Profile:
    """One walk over the ledger."""
    sizes: dict[int, int] = {}
    live = before = peak = peak_index = start = 0
    last = max(e.step for e in ledger.events if isinstance(e, Marked))
    ends: list[tuple[str, int]] = []
    steady = False
    for index, event in enumerate(ledger.events):
        kind = type(event)
        if kind is Allocated:
            size = sizes[event.storage] = (event.num_bytes + 511) & ~511  # type: ignore[union-attr]
            live += size
            if steady and live > peak:
                peak, peak_index = live, index
        elif kind is Freed:
            live -= sizes.pop(event.storage)  # type: ignore[union-attr]
        elif kind is Marked:
            if steady:
                ends.append((event.phase, live))  # type: ignore[union-attr]
            elif _begins(event, last):  # type: ignore[arg-type]
                steady, before, peak, peak_index, start = True, live, live, index, index
    return Profile(before, tuple(ends), peak, peak_index, start)


def _begins(mark: Marked, step: int) -> bool:
    """Whether `mark` is where optimizer step `step` begins."""
    if step == 0:
        return mark.phase == "build"
    return mark.phase == "zero_grad" and mark.step == step - 1


def instant(ledger: Ledger, event_index: int, num_largest: int = 8) -> Instant:
    """What is alive right after event `event_index`."""
    alive: dict[int, Allocated] = {}
    categories: dict[int, Category] = {}
    for event in ledger.events[: _with_tags(ledger.events, event_index)]:
        if isinstance(event, Allocated):
            alive[event.storage] = event
        elif isinstance(event, Freed):
            alive.pop(event.storage)
            categories.pop(event.storage, None)
        elif isinstance(event, Tagged):
            categories[event.storage] = event.category
    by_category: dict[Category, int] = {}
    for storage, event in alive.items():
        category = categories.get(storage, "temporaries")
        by_category[category] = by_category.get(category, 0) + rounded(event.num_bytes)
    transient = [
        e for s, e in alive.items() if categories.get(s) in (None, "temporaries", "activations")
    ]
    transient.sort(key=lambda e: -e.num_bytes)
    phase, micro_batch = _phase_at(ledger.events, event_index)
    last = next(
        (e for e in reversed(ledger.events[: event_index + 1]) if isinstance(e, Allocated)), None
    )
    return Instant(
        event_index,
        phase,
        micro_batch,
        last.label if last else "",
        last.path if last else "",
        sum(by_category.values()),
        by_category,
        tuple((e.path, e.label, e.num_bytes) for e in transient[:num_largest]),
    )


def _with_tags(events: Sequence[Event], index: int) -> int:
    """One past `index` and the tags right behind it: they say what was just allocated."""
    end = index + 1
    while end < len(events) and isinstance(events[end], Tagged):
        end += 1
    return end


def _phase_at(events: Sequence[Event], index: int) -> tuple[str, int]:
    """The phase that event `index` belongs to, and which micro-batch of its step it is in."""
    micro_batch = 1
    for event in events[:index]:
        if isinstance(event, Marked):
            if event.phase == "zero_grad":
                micro_batch = 1
            elif event.phase == "backward":
                micro_batch += 1
    mark = next((e for e in events[index:] if isinstance(e, Marked)), None)
    phase = mark.phase if mark else ""
    return phase, micro_batch
