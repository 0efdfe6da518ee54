"""A recorded step at any batch size: its events are the same, its sizes affine in the batch.

Two recordings at different batches (2 or more) give every size as fixed + batch * per image. At
batch 1 dimensions of size 1 change which copies happen (strides), so it is recorded by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import overload

from planner.ledger import Allocated, Computed, Event, Ledger
from planner.memory.course import Course

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
        if batch_size > 1 and self.line is not None:
            return self.line.ledger(batch_size)
        if batch_size in self.known:
            return self.known[batch_size]
        others = [b for b in self.known if b > 1]
        if batch_size > 1 and others:
            second = self.record(2 if others[0] != 2 else 3)
            self.line = Line.through(self.known[others[0]], second)
            return self.line.ledger(batch_size)
        self.known[batch_size] = self.record(batch_size)
        return self.known[batch_size]


@dataclass(frozen=True)
class Line:
    """The ledger at one batch, and `slopes`: by event, the bytes and FLOPs an image more adds."""

    at: Ledger
    slopes: dict[int, tuple[int, int]]

    @classmethod
    def through(cls, first: Ledger, second: Ledger) -> Line:
        """The line through two recordings. AssertionError where their events differ in kind."""
        assert len(first.events) == len(second.events), "a step's events depend on the batch"
        span = second.batch_size - first.batch_size
        slopes = {}
        for index, (a, b) in enumerate(zip(first.events, second.events, strict=True)):
            slope = (0, 0)
            if isinstance(a, Allocated) and isinstance(b, Allocated):
                slope = _slope(a.num_bytes, b.num_bytes, span), 0
            elif isinstance(a, Computed) and isinstance(b, Computed):
                slope = _slope(a.num_bytes, b.num_bytes, span), _slope(a.flops, b.flops, span)
            else:
                assert type(a) is type(b), "a step's events depend on the batch"
            if any(slope):
                slopes[index] = slope
        return cls(first, slopes)

    def ledger(self, batch_size: int) -> Ledger:
        """The ledger at another batch of 2 or more. Its events are made when they are looked at."""
        events = LineEvents(self, batch_size)
        return replace(self.at, events=events, batch_size=batch_size)

    def events(self, batch_size: int) -> tuple[Event, ...]:
        """All events at a batch of 2 or more."""
        more = batch_size - self.at.batch_size
        events = list(self.at.events)
        for index, (num_bytes, flops) in self.slopes.items():
            event = events[index]
            if isinstance(event, Allocated):
                events[index] = event._replace(num_bytes=event.num_bytes + more * num_bytes)
            elif isinstance(event, Computed):
                events[index] = event._replace(
                    num_bytes=event.num_bytes + more * num_bytes, flops=event.flops + more * flops
                )
        return tuple(events)

    @cached_property
    def course(self) -> Course | None:
        """What of the step no batch changes, or None where the step does not repeat."""
        try:
            return Course(self.at.events, self.slopes, self.at.batch_size)
        except ValueError:
            return None


class LineEvents(Sequence[Event]):
    """The events of a line at a batch: a sequence, which most readers need not look through since
    `course` knows the answer."""

    def __init__(self, line: Line, batch_size: int) -> None:
        self.line = line
        self.batch_size = batch_size

    @property
    def course(self) -> Course | None:
        return self.line.course

    @cached_property
    def _made(self) -> tuple[Event, ...]:
        return self.line.events(self.batch_size)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Event, ...]: ...
    def __getitem__(self, index: int | slice) -> Event | tuple[Event, ...]:
        return self._made[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self.line.at.events)

    def __eq__(self, other: object) -> bool:
        return self._made == (other._made if isinstance(other, LineEvents) else other)

    def __hash__(self) -> int:
        return hash(self._made)


def operations_of(ledger: Ledger) -> Iterable[tuple[str, Computed]]:
    """(phase, operation), in order, of the steady step: of a line without looking at its events."""
    course = ledger.events.course if isinstance(ledger.events, LineEvents) else None
    return course.operations(ledger.batch_size) if course else ledger.operations()


def _slope(a: int, b: int, span: int) -> int:
    slope, rest = divmod(b - a, span)
    assert rest == 0, "a size is not affine in the batch"
    return slope
