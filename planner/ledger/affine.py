"""A recorded step at any batch size: the events stay the same, their sizes are affine in the batch.

A recording at a huge batch gives every size as fixed + batch * per image. A batch of 1 is another
step (dimensions of size 1 change which copies happen), so it is recorded by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from planner.ledger.ledger import (
    Allocated,
    Computed,
    Event,
    EventsAt,
    Ledger,
    Scratch,
)

Record = Callable[[int], Ledger]  # the ledger at a batch size
# A batch beyond all sizes that do not grow with it: of a size there, fixed + HUGE * per image, both
# parts are read off like digits.
_HUGE_BITS = 40
HUGE = 1 << _HUGE_BITS
_HALF = HUGE // 2


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
    def from_huge(cls, recorded: Ledger) -> AffineLedger:
        """The line read off one recording at batch HUGE, of a step that is known to be affine and
        that no batch is too large for: one on shapes."""
        assert recorded.batch_size == HUGE
        return cls(recorded, None)

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


def _per_image(sizes: Iterable[int]) -> list[int]:
    """Of sizes at batch HUGE; what is fixed of one may be negative."""
    return [(size + _HALF) >> _HUGE_BITS for size in sizes]
