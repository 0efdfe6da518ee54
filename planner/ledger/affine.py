"""A recorded step at any batch size: the events stay the same, their sizes are affine in the batch.

Two recordings, at batches of 2 or more, give every size as fixed + batch * per image; a third one
shows whether that holds. A batch of 1 is another step (dimensions of size 1 change which copies
happen), so it is recorded by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice, zip_longest
from operator import itemgetter
from typing import Any

from planner.core.errors import UnsupportedError
from planner.ledger.ledger import (
    Allocated,
    Awaited,
    Computed,
    Emptied,
    Event,
    EventsAt,
    Freed,
    Ledger,
    Marked,
    Scratch,
    Sent,
    Tagged,
)

Record = Callable[[int], Ledger]  # the ledger at a batch size
# A batch beyond all sizes that do not grow with it: of a size there, fixed + HUGE * per image, both
# parts are read off like digits.
_HUGE_BITS = 40
HUGE = 1 << _HUGE_BITS
_HALF = HUGE // 2


class NotAffineError(UnsupportedError):
    """A step whose events or sizes do not follow a line over the batch: a loss that compares all
    images with each other, a batch that is processed in chunks."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"this training step does not grow evenly with the batch size: {message}.",
            "Name one batch size (--batch-size) and add --trace, which follows the step at that "
            "size, or measure it with 'planner tune'.",
        )


@dataclass(frozen=True)
class AffineLedger:
    """The ledger at one batch, and what is `known` of its `slopes`: by event, the bytes and FLOPs
    that an image more adds, or of scratch what it adds to each of its sizes. None: they are read
    off a ledger at HUGE.

    An event without a slope is the same at every batch.
    """

    at: Ledger
    known: Mapping[int, tuple[int, ...]] | None

    @cached_property
    def slopes(self) -> Mapping[int, tuple[int, ...]]:
        if self.known is not None:
            return self.known
        places, _, slopes = self.requests
        numbers, _, *of_work = self.work
        found = {index: (slope, 0) for index, slope in zip(places, slopes, strict=True)}
        found |= {index: (of_work[0][n], of_work[1][n]) for index, n in numbers.items()}
        scratch = {places[n]: each for (_, _, each), ns in self.scratch.items() for n in ns}
        return {index: each for index, each in (found | scratch).items() if any(each)}

    @classmethod
    def through(cls, first: Ledger, second: Ledger) -> AffineLedger:
        """The line through two recordings at different batches of 2 or more.

        Raises NotAffineError where their events differ, or where an image adds no whole number of
        bytes or FLOPs. `check` a third recording: two cannot show that sizes are affine.
        """
        span = second.batch_size - first.batch_size
        assert span, "two recordings of one batch"
        assert min(first.batch_size, second.batch_size) > 1, "a batch of 1 is another step"
        slopes: dict[int, tuple[int, ...]] = {}
        for index, (a, b) in enumerate(_pairs(first, second)):
            if a == b:
                continue
            slope = _slope(a, b, span)
            if slope is None:
                raise NotAffineError(_describe_difference(a, b, first, second))
            slopes[index] = slope
        return cls(first, slopes)

    @classmethod
    def from_huge(cls, recorded: Ledger) -> AffineLedger:
        """The line read off one recording at batch HUGE, of a step that is known to be affine and
        that no batch is too large for: one on shapes."""
        assert recorded.batch_size == HUGE
        return cls(recorded, None)

    def check(self, third: Ledger) -> None:
        """Raises NotAffineError where a recording at a third batch differs from `ledger` there. Of
        one that has fewer whole steps, only those are compared.

        Choose three batches of which two lie well apart: what is done in chunks of images, or for
        each pair of them, can look affine between neighbours.
        """
        expected = self.ledger(third.batch_size)
        last = third.events[-1] if third.events else None
        ends_a_step = isinstance(last, Marked) and last.phase == "zero_grad"
        for a, b in islice(_pairs(expected, third), len(third.events) if ends_a_step else None):
            if a != b:
                raise NotAffineError(_describe_difference(a, b, expected, third, derived=True))

    def ledger(self, batch_size: int) -> Ledger:
        """The ledger at another batch of 2 or more."""
        assert batch_size > 1, "a batch of 1 is another step"
        if batch_size == self.at.batch_size:
            return self.at
        return replace(self.at, events=EventsAt(self, batch_size), batch_size=batch_size)

    @cached_property
    def requests(self) -> tuple[list[int], list[int], list[int]]:
        """Of each request, in order: its index, its bytes without an image, and those per image.
        Scratch has none."""
        events: Sequence[Any] = self.at.events
        places = self.at.places[Allocated]
        sizes = [events[i][1] if type(events[i]) is Allocated else 0 for i in places]
        return places, *self._lines(places, sizes, 0, Allocated)

    @cached_property
    def work(self) -> tuple[dict[int, int], list[list[Any]], list[int], list[int]]:
        """The operations, each once (work that repeats is one object): its number by index, their
        fields one by one, without an image, and the bytes and the FLOPs that one adds."""
        events: Sequence[Any] = self.at.events
        known: dict[int, int] = {}
        numbers: dict[int, int] = {}
        places: list[int] = []
        for index in self.at.places[Computed]:
            number = numbers[index] = known.setdefault(id(events[index]), len(places))
            if number == len(places):
                places.append(index)
        columns = list(map(list, zip(*[events[index] for index in places], strict=True)))
        columns = columns or [[] for _ in Computed._fields]
        columns[4], slopes = self._lines(places, columns[4], 0, Computed)
        columns[3], of_flops = self._lines(places, columns[3], 1, Computed)
        return numbers, columns, slopes, of_flops

    def _lines(
        self, places: list[int], sizes: list[int], field: int, kind: type[Event]
    ) -> tuple[list[int], list[int]]:
        """What of the `sizes` of events is fixed, and what an image adds: `field` of the slopes of
        those of this kind, and nothing to others."""
        known, events, batch_size = self.known, self.at.events, self.at.batch_size
        if known is None:
            slopes = _per_image(sizes)
        else:
            slopes = [
                known[index][field] if index in known and type(events[index]) is kind else 0
                for index in places
            ]
        lines = zip(sizes, slopes, strict=True)
        return [size - batch_size * slope for size, slope in lines], slopes

    @cached_property
    def scratch(self) -> dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]]:
        """The numbers of the requests for scratch, by law, sizes and what an image adds to them."""
        found: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
        events: Sequence[Any] = self.at.events
        known = self.known
        for number, index in enumerate(self.requests[0]):
            if type(event := events[index]) is Scratch:
                sizes = event[2]
                slopes = _per_image(sizes) if known is None else known.get(index, (0,) * len(sizes))
                found.setdefault((event[1], sizes, tuple(slopes)), []).append(number)
        return found


@dataclass
class Recorder:
    """Ledgers at any batch of one step on shapes, which is affine, from at most three recordings.

    The first batch is recorded as it is; the second one asked for makes the affine ledger, from
    which all others are read. A batch of 1 is always recorded by itself.
    """

    record: Record
    known: dict[int, Ledger] = field(default_factory=dict)
    affine: AffineLedger | None = None

    def line(self) -> AffineLedger:
        """The ledger of all batches from 2 on, by one recording."""
        if self.affine is None:
            self.affine = AffineLedger.from_huge(self.record(HUGE))
        return self.affine

    def ledger(self, batch_size: int) -> Ledger:
        """The ledger at `batch_size`."""
        if batch_size in self.known:
            return self.known[batch_size]
        if batch_size > 1 and (self.affine is not None or max(self.known, default=1) > 1):
            return self.line().ledger(batch_size)
        self.known[batch_size] = self.record(batch_size)
        return self.known[batch_size]


def in_canonical_order(events: Iterable[Event]) -> list[Event]:
    """The events with each run of releases, and each run of tags, ordered by storage.

    Their order within one instant is arbitrary (autocast empties a hash map) and moves no size.
    """
    ordered: list[Event] = []
    for kind, run in groupby(events, type):
        alike = list(run)
        if kind in (Freed, Tagged):
            alike.sort(key=itemgetter(0))
        ordered += alike
    return ordered


def _pairs(first: Ledger, second: Ledger) -> Iterable[tuple[Event | None, Event | None]]:
    """The events of both side by side. What has a size keeps its place in `first.events`."""
    return zip_longest(in_canonical_order(first.events), in_canonical_order(second.events))


def _slope(a: Event | None, b: Event | None, span: int) -> tuple[int, ...] | None:
    """Bytes and FLOPs per image, or what one adds to the sizes of scratch, between two events that
    differ only in these; else None."""
    if isinstance(a, Allocated) and isinstance(b, Allocated):
        found = divmod(b.num_bytes - a.num_bytes, span)
        return (found[0], 0) if a == b._replace(num_bytes=a.num_bytes) and not found[1] else None
    if isinstance(a, Computed) and isinstance(b, Computed):
        if a != b._replace(num_bytes=a.num_bytes, flops=a.flops):
            return None
        num_bytes, rest = divmod(b.num_bytes - a.num_bytes, span)
        flops, rest_of_flops = divmod(b.flops - a.flops, span)
        return None if rest or rest_of_flops else (num_bytes, flops)
    if isinstance(a, Scratch) and isinstance(b, Scratch) and a == b._replace(sizes=a.sizes):
        pairs = [divmod(y - x, span) for x, y in zip(a.sizes, b.sizes, strict=True)]
        return None if any(rest for _, rest in pairs) else tuple(slope for slope, _ in pairs)
    return None


def _per_image(sizes: Iterable[int]) -> list[int]:
    """Of sizes at batch HUGE; what is fixed of one may be negative."""
    return [(size + _HALF) >> _HUGE_BITS for size in sizes]


_FIELDS = {"num_bytes": "bytes", "flops": "FLOPs"}


def _describe_difference(
    a: Event | None, b: Event | None, first: Ledger, second: Ledger, derived: bool = False
) -> str:
    """The first difference in words. `first` is a recording, or `derived` from two of them."""
    here, there = _name(a, first.events), _name(b, second.events)
    source = "expected from two other batches" if derived else f"at batch {first.batch_size}"
    if here != there or a is None or b is None:
        return f"{source} {here} comes next, at batch {second.batch_size} {there}"
    span = 0 if derived else second.batch_size - first.batch_size
    fields = zip(a._fields, a, b, strict=True)
    differing = [(f, x, y) for f, x, y in fields if x != y and not _is_affine(f, x, y, span)]
    field, x, y = (f"{v:,}" if isinstance(v, int) else str(v) for v in differing[0])
    return (
        f"{here} differs in {_FIELDS.get(field, field)}: {x} {source}, {y} at batch "
        f"{second.batch_size}"
    )


def _is_affine(field: str, x: object, y: object, span: int) -> bool:
    if field not in _FIELDS or not isinstance(x, int) or not isinstance(y, int):
        return False
    return span != 0 and (y - x) % span == 0


def _name(event: Event | None, events: Sequence[Event]) -> str:
    """An event in words: an operation of a module, or what became of one's storage."""
    if event is None:
        return "the end of the step"
    if isinstance(event, Marked):
        return f"the end of the {event.phase}"
    if isinstance(event, Freed | Tagged):
        verb = "release" if isinstance(event, Freed) else "keeping"
        made = (
            e for e in events if isinstance(e, Allocated | Scratch) and e.storage == event.storage
        )
        return f"the {verb} of what {_name(next(made, None), ())} made"
    if isinstance(event, Emptied):
        return "emptying the cache"
    if isinstance(event, Awaited):
        sent = (e for e in events if isinstance(e, Sent) and e.handle == event.handle)
        return f"the wait for what {_name(next(sent, None), ())} sent"
    if isinstance(event, Sent):
        return f"{event.collective} of {event.path}" if event.path else event.collective
    name = event.label if isinstance(event, Allocated | Scratch) else event.name
    return f"{name} of {event.path}" if event.path else name
