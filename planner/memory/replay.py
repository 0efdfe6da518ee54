"""A sequence of requests and releases, played through the CUDA caching allocator's rules.

`torch.cuda.memory_allocated()` counts blocks and `memory_reserved()` counts segments, and neither
follows from the sizes of the tensors alone: a block may be up to 1 MiB larger than its request, and
a segment goes back to the driver only when memory runs out. So the sequence is played out.

An entry n >= 0 of `requests` asks for n bytes (0 takes no memory, as in torch); an entry -k - 1,
that is `~k`, releases what entry k got. `streams` are the numbers of the CUDA streams that the
entries are of, a release that of what it releases; without any, all are of stream 0. Before the
entries `emptied` the allocator's cache is emptied: all of them before the steady step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat

from planner.memory.allocator_config import AllocatorConfig
from planner.memory.caching_allocator import (
    ADDRESS_BITS,
    ADDRESS_MASK,
    SMALL,
    UNIT_BITS,
    UNIT_BYTES,
    Block,
    CachingAllocator,
    OutOfMemoryError,
)

_NO_BLOCK: Block = (0, 0)
_AT_ONCE = 256  # requests played until the next look at whether the rest recurs
# Steps played within a limit, at most: those of a Swin recur from the second to the sixth on.
MAX_STEPS = 16


@dataclass(frozen=True)
class SteadyPeaks:
    """The most allocated and reserved from the steady step on, what it began with included, as
    after `torch.cuda.reset_peak_memory_stats()`. `reserved_by_stream` is how the streams, by
    number, share what is reserved at the end: the most, where nothing went back to the driver.
    `num_alloc_retries` is how often cached memory was freed to serve a request, from the beginning
    on, and `retries_each_step` how often of these in the step that was played last."""

    allocated_bytes: int
    reserved_bytes: int
    reserved_by_stream: tuple[int, ...] = field(default=(), compare=False)
    num_alloc_retries: int = 0
    retries_each_step: int = 0


@dataclass(frozen=True)
class SteadyCourse:
    """Bytes before the steady step and after each of its entries: all that is allocated, and what
    each stream, by number, has reserved. Of two playings it is the later one that reaches the
    most reserved: the second, where nothing goes back to the driver."""

    allocated_bytes: list[int] = field(repr=False)
    reserved_by_stream: list[tuple[int, ...]] = field(repr=False)

    @property
    def reserved_bytes(self) -> list[int]:
        return [sum(each) for each in self.reserved_by_stream]


def replay_steady(
    requests: Sequence[int],
    steady_from: int,
    config: AllocatorConfig | None = None,
    streams: Sequence[int] = (),
    emptied: Sequence[int] = (),
) -> SteadyPeaks:
    """What a steady step, the requests from entry `steady_from` on, needs by itself.

    It is played twice: reserved bytes can still rise the second time, as the step before it left
    other holes than it leaves itself, and blocks be others than the first time. A device measured
    after warm-up is past that: the most allocated is that of the second time.

    Memory does not run out, so that what it needs is known.
    """
    return _play_steady(requests, steady_from, config, streams, emptied)[0].peaks()


def replay_within(
    requests: Sequence[int],
    steady_from: int,
    config: AllocatorConfig | None,
    allowed_bytes: int,
    streams: Sequence[int] = (),
    emptied: Sequence[int] = (),
) -> SteadyPeaks | None:
    """What it needs where the driver has `allowed_bytes` and no more: a request that it cannot
    serve frees what is cached and asks again. None where memory runs out even so.

    What is freed is asked for anew, in other segments, so that the next step finds other holes: it
    is played until every block lies where it lay in the step before, `MAX_STEPS` times at most.
    """
    left = handed_on(requests, steady_from, streams)
    num_steps = 1 if left is None else MAX_STEPS
    of_repeated = list(streams[steady_from:]) * (num_steps - 1)
    player = Player(config, allowed_bytes, [*streams, *of_repeated])
    period = len(requests) - steady_from
    try:
        player.begin(requests, steady_from, emptied)
        player.play(requests[steady_from:], steady_from)
        for number in range(1, num_steps):
            player.reset_peaks()
            player.play(*repeated(requests, steady_from, left or {}, number))
            if player.blocks[-period:] == player.blocks[-2 * period : -period]:
                break
    except OutOfMemoryError:
        return None
    return player.peaks()


def steady_course(
    requests: Sequence[int],
    steady_from: int,
    config: AllocatorConfig | None = None,
    streams: Sequence[int] = (),
    emptied: Sequence[int] = (),
) -> SteadyCourse:
    """How `replay_steady` comes to its peaks, entry by entry."""
    player, is_twice = _play_steady(requests, steady_from, config, streams, emptied)
    count = len(requests)
    end = count + (count - steady_from if is_twice else 0)
    allocated = _allocated(requests, player.blocks[:count])
    reserved = player.reserved_until(end)
    playings = [(allocated[steady_from:], reserved[steady_from : count + 1])]
    if is_twice:
        again = player.blocks[count:]
        # What the second playing left out recurs as it was.
        blocks = [*again, *player.blocks[steady_from + len(again) : count]]
        following = _allocated(requests[steady_from:], blocks, allocated[-1])
        playings.append((following, reserved[count:]))
    return SteadyCourse(*max(reversed(playings), key=lambda each: max(map(sum, each[1]))))


def _allocated(requests: Sequence[int], blocks: Sequence[Block], before: int = 0) -> list[int]:
    """Bytes allocated before the requests that got or gave back `blocks`, and after each."""
    pairs = zip(requests, blocks, strict=False)
    changes = ((block[1] if request > 0 else -block[1]) << UNIT_BITS for request, block in pairs)
    return list(accumulate(changes, initial=before))


def _play_steady(
    requests: Sequence[int],
    steady_from: int,
    config: AllocatorConfig | None,
    streams: Sequence[int],
    emptied: Sequence[int],
) -> tuple[Player, bool]:
    """What has played the steady step, and whether twice: once where it leaves other blocks than
    it takes over."""
    left = handed_on(requests, steady_from, streams)
    player = Player(config, None, streams)
    player.begin(requests, steady_from, emptied)
    player.play(requests[steady_from:], steady_from)
    if left is not None:
        player.peak_allocated = player.allocated
        player.play_again(requests, steady_from, left)
    return player, left is not None


def repeated(
    requests: Sequence[int], start: int, left: dict[int, int], number: int
) -> tuple[list[int], int]:
    """The steady step's requests for the `number`-th time after the first, and their first entry:
    what it releases of the step before it are the entries `left` of that one."""
    period = len(requests) - start
    later, before = number * period, (number - 1) * period
    again = [
        n if n >= 0 else n - later if ~n >= start else ~(left[~n] + before) if ~n in left else n
        for n in requests[start:]
    ]
    return again, start + later


def handed_on(
    requests: Sequence[int], start: int, streams: Sequence[int] = ()
) -> dict[int, int] | None:
    """What the steady step takes over from the step before it, and what it leaves in its place:
    {entry released in the step: entry of the step still held at its end}.

    The n-th block left over stands for the n-th one taken over. None where the step leaves more or
    other blocks than it takes over, so that it is no steady one.
    """
    released = {~n for n in requests[start:] if n < 0}
    taken_over = sorted(entry for entry in released if entry < start and requests[entry])
    left = [i for i in range(start, len(requests)) if requests[i] > 0 and i not in released]
    if [requests[i] for i in taken_over] != [requests[i] for i in left]:
        return None
    if streams and [streams[i] for i in taken_over] != [streams[i] for i in left]:
        return None
    return dict(zip(taken_over, left, strict=True))


class Player:
    """An allocator and what became of the entries played, in units.

    `blocks` is what each entry got or gave back, `reservations` each change of what is reserved as
    (entry, bytes of each stream after it), and `grown_at` the last entry at which each pool, the
    small and the large of stream 0, of stream 1 …, took memory from the driver.
    """

    def __init__(
        self, config: AllocatorConfig | None, allowed_bytes: int | None, streams: Sequence[int]
    ) -> None:
        num_streams = max(streams, default=0) + 1
        self.blocks: list[Block] = []
        self.allocator = CachingAllocator(
            config, allowed_bytes=allowed_bytes, num_streams=num_streams
        )
        self.streams = streams
        self.reservations: list[tuple[int, tuple[int, ...]]] = []
        self.grown_at = [-1, -1] * num_streams
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self.retries_before = 0

    def begin(self, requests: Sequence[int], steady_from: int, emptied: Sequence[int]) -> None:
        """Play what comes before the steady step. Raises OutOfMemoryError."""
        begun = 0
        for entry in emptied:
            self.play(requests[begun:entry], begun)
            self.empty_cache()
            begun = entry
        self.play(requests[begun:steady_from], begun)
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats()`."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved
        self.retries_before = self.allocator.num_alloc_retries

    def peaks(self) -> SteadyPeaks:
        return SteadyPeaks(
            self.peak_allocated << UNIT_BITS,
            self.peak_reserved << UNIT_BITS,
            self.allocator.reserved_by_stream,
            self.allocator.num_alloc_retries,
            self.allocator.num_alloc_retries - self.retries_before,
        )

    def course(self, requests: Sequence[int]) -> SteadyCourse:
        """Before the first of the `requests` that were played, and after each."""
        allocated = _allocated(requests, self.blocks)
        return SteadyCourse(allocated, self.reserved_until(len(self.blocks)))

    def empty_cache(self) -> None:
        """As `torch.cuda.empty_cache()`, before the next entry."""
        self.allocator.empty_cache()
        self.reserved = self.allocator.reserved_units
        if self.blocks:
            entry = len(self.blocks) - 1
            self.reservations.append((entry, self.allocator.reserved_by_stream))

    def reserved_until(self, num_entries: int) -> list[tuple[int, ...]]:
        """Bytes that each stream has reserved before the first entry, and after each."""
        course = [(0,) * len(self.allocator.small)]
        for entry, by_stream in [*self.reservations, (num_entries, ())]:
            course += [course[-1]] * (entry + 1 - len(course))
            course.append(by_stream)
        return course[:-1]

    def play(self, requests: Sequence[int], start: int) -> None:
        """Play further requests, of which the first is entry `start`. Raises OutOfMemoryError.

        Without options it takes the best fit by itself: a call for each would take a third.
        """
        allocator, blocks, allocated = self.allocator, self.blocks, self.allocated
        small, large, is_plain = allocator.small, allocator.large, allocator.is_plain
        peak = self.peak_allocated
        streams = self.streams[start : start + len(requests)] or repeat(0)
        for request, stream in zip(requests, streams, strict=False):
            if request > 0:
                units = (request + UNIT_BYTES - 1) >> UNIT_BITS
                pool = small[stream] if units <= SMALL else large[stream]
                ordered = pool.ordered
                index = bisect_left(ordered, units << ADDRESS_BITS)
                if is_plain and index < len(ordered):
                    number = ordered[index]
                    address, size = number & ADDRESS_MASK, number >> ADDRESS_BITS
                    if address + size in pool.unmapped:  # it lies at the growing end
                        number = ordered[index := pool.best_fit(units)]
                        address, size = number & ADDRESS_MASK, number >> ADDRESS_BITS
                    del pool.starts[address]
                    rest = size - units
                    if rest < pool.min_rest:
                        del pool.ends[address + size], ordered[index]
                        block = address, size
                    else:
                        first = address + units
                        pool.starts[first] = pool.ends[address + size] = rest
                        number = rest << ADDRESS_BITS | first
                        if index and ordered[index - 1] > number:
                            del ordered[index]
                            insort(ordered, number, 0, index)
                        else:
                            ordered[index] = number
                        block = address, units
                else:
                    block = allocator.allocate(request, stream)
                    if allocator.reserved_units != self.reserved:
                        self._note_reserved(block, stream)
                allocated += block[1]
                if allocated > peak:
                    peak = allocated
            else:
                block = blocks[~request] if request else _NO_BLOCK
                size = block[1]
                if size:
                    allocated -= size
                    (small[stream] if size <= SMALL else large[stream]).merge(*block)
            blocks.append(block)
        self.allocated, self.peak_allocated = allocated, peak

    def play_again(self, requests: Sequence[int], start: int, handed_on: dict[int, int]) -> None:
        """Play the requests from entry `start` on once more, until the rest must recur.

        It must where every live block lies where its counterpart lay one step before, and nothing
        was taken from the driver in between: which blocks are free follows from which are not.
        `num_moved` counts the live blocks that lie elsewhere.
        """
        blocks, count = self.blocks, len(requests)
        again, _ = repeated(requests, start, handed_on, 1)
        self.streams = [*self.streams, *self.streams[start:]]
        num_moved = sum(blocks[before] != blocks[now] for before, now in handed_on.items())
        for entry in range(start, count, _AT_ONCE):
            if not num_moved and max(self.grown_at) < entry:
                rest = _allocated(requests[entry:], blocks[entry:count])
                most = self.allocated + (max(rest) >> UNIT_BITS)
                self.peak_allocated = max(self.peak_allocated, most)
                break
            part = again[entry - start : entry - start + _AT_ONCE]
            self.play(part, len(blocks))
            pairs = zip(part, blocks[-len(part) :], blocks[entry : entry + _AT_ONCE], strict=False)
            num_moved += sum(1 if asked > 0 else -1 for asked, now, then in pairs if now != then)

    def _note_reserved(self, block: Block, stream: int) -> None:
        """The request of `stream` that got `block` changed what is reserved."""
        entry = len(self.blocks)
        self.reserved = self.allocator.reserved_units
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.reservations.append((entry, self.allocator.reserved_by_stream))
        self.grown_at[2 * stream + (block[1] > SMALL)] = entry
