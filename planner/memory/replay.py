"""A sequence of requests and releases, played through the CUDA caching allocator's rules.

`torch.cuda.memory_allocated()` counts blocks and `memory_reserved()` counts segments, and neither
follows from the sizes of the tensors alone: a block may be up to 1 MiB larger than its request, and
a segment goes back to the driver only when memory runs out. So the sequence is played out: first
the functions that play a steady step, last the `Player` that plays entries.

An entry n >= 0 of `requests` asks for n bytes (0 takes no memory, as in torch); an entry -k - 1,
that is `~k`, releases the block of entry k. `streams` has the CUDA stream's number of each entry,
the same for a request and its release; without it all are of stream 0. The allocator's cache is
emptied before each of the entries in `emptied`, which all come before the steady step.
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
_CHUNK_LENGTH = 256  # requests between two checks of whether the remaining ones must recur
# The most steps that are played within a limit: a Swin's steps recur from the second to the sixth
# on.
MAX_STEPS = 16


@dataclass(frozen=True)
class SteadyPeaks:
    """The peaks of allocated and reserved bytes from the steady step on, with what it began with,
    as after `torch.cuda.reset_peak_memory_stats()`. `reserved_by_stream` holds, by the stream's
    number, the bytes reserved at the end: the peak, where nothing went back to the driver.
    `num_alloc_retries` counts, from the beginning on, how often cached memory was freed to serve a
    request; `retries_each_step` counts only the step that was played last."""

    allocated_bytes: int
    reserved_bytes: int
    reserved_by_stream: tuple[int, ...] = field(default=(), compare=False)
    num_alloc_retries: int = 0
    retries_each_step: int = 0


@dataclass(frozen=True)
class SteadyTrace:
    """Bytes before the steady step and after each of its entries: all that is allocated, and what
    is reserved by each stream, by number. Where the step was played twice, this is the time that
    reserved more, or else the second."""

    allocated_bytes: list[int] = field(repr=False)
    reserved_by_stream: list[tuple[int, ...]] = field(repr=False)

    @property
    def reserved_bytes(self) -> list[int]:
        return [sum(by_stream) for by_stream in self.reserved_by_stream]


def replay_steady(
    requests: Sequence[int],
    steady_entry: int,
    config: AllocatorConfig | None = None,
    streams: Sequence[int] = (),
    emptied: Sequence[int] = (),
) -> SteadyPeaks:
    """The peaks of the steady step, which is the requests from `steady_entry` on, where memory does
    not run out.

    The step is played twice: the step before it leaves other holes than it leaves itself, so that
    the second time blocks may differ and reserved bytes may still rise. A device that is measured
    after its warm-up is past that: the peak of allocated bytes is that of the second time.
    """
    return _play_steady(requests, steady_entry, config, streams, emptied)[0].peaks()


def replay_within_limit(
    requests: Sequence[int],
    steady_entry: int,
    config: AllocatorConfig | None,
    allowed_bytes: int,
    streams: Sequence[int] = (),
    emptied: Sequence[int] = (),
) -> SteadyPeaks | None:
    """The peaks of the steady step where the driver has only `allowed_bytes`: a request that it
    cannot serve frees cached memory and asks again. None where memory runs out even so.

    The freed memory is requested anew, in other segments, so that the next step finds other holes.
    So the step is played until every block lies where it lay in the step before, but at most
    `MAX_STEPS` times.
    """
    successors = match_carried_entries(requests, steady_entry, streams)
    num_steps = 1 if successors is None else MAX_STEPS
    repeated_streams = list(streams[steady_entry:]) * (num_steps - 1)
    player = Player(config, allowed_bytes, [*streams, *repeated_streams])
    period = len(requests) - steady_entry
    try:
        player.begin(requests, steady_entry, emptied)
        player.play(requests[steady_entry:], steady_entry)
        for number in range(1, num_steps):
            player.reset_peaks()
            player.play(*repeat_step(requests, steady_entry, successors or {}, number))
            if player.blocks[-period:] == player.blocks[-2 * period : -period]:
                break
    except OutOfMemoryError:
        return None
    return player.peaks()


def trace_steady(
    requests: Sequence[int],
    steady_entry: int,
    config: AllocatorConfig | None = None,
    streams: Sequence[int] = (),
    emptied: Sequence[int] = (),
) -> SteadyTrace:
    """The bytes of `replay_steady` entry by entry."""
    player, is_twice = _play_steady(requests, steady_entry, config, streams, emptied)
    count = len(requests)
    end = count + (count - steady_entry if is_twice else 0)
    allocated = trace_allocated(requests, player.blocks[:count])
    reserved = player.trace_reserved(end)
    traces = [SteadyTrace(allocated[steady_entry:], reserved[steady_entry : count + 1])]
    if is_twice:
        second_blocks = player.blocks[count:]
        # The requests that the second time left out recur as they were.
        blocks = [*second_blocks, *player.blocks[steady_entry + len(second_blocks) : count]]
        second = trace_allocated(requests[steady_entry:], blocks, allocated[-1])
        traces.append(SteadyTrace(second, reserved[count:]))
    return max(reversed(traces), key=lambda trace: max(trace.reserved_bytes))


def trace_allocated(requests: Sequence[int], blocks: Sequence[Block], before: int = 0) -> list[int]:
    """The bytes allocated before the requests that got or gave back `blocks`, and after each."""
    pairs = zip(requests, blocks, strict=False)
    changes = ((block[1] if request > 0 else -block[1]) << UNIT_BITS for request, block in pairs)
    return list(accumulate(changes, initial=before))


def _play_steady(
    requests: Sequence[int],
    steady_entry: int,
    config: AllocatorConfig | None,
    streams: Sequence[int],
    emptied: Sequence[int],
) -> tuple[Player, bool]:
    """A player that has played the steady step, and whether twice: only once where the step leaves
    other blocks than it takes over."""
    successors = match_carried_entries(requests, steady_entry, streams)
    player = Player(config, None, streams)
    player.begin(requests, steady_entry, emptied)
    player.play(requests[steady_entry:], steady_entry)
    if successors is not None:
        player.peak_allocated = player.allocated
        player.play_again(requests, steady_entry, successors)
    return player, successors is not None


def repeat_step(
    requests: Sequence[int], start: int, successors: dict[int, int], number: int
) -> tuple[list[int], int]:
    """The requests of the steady step, repeated for the `number`-th time, and their first entry."""
    period = len(requests) - start
    offset = number * period
    repeated = []
    for request in requests[start:]:
        if request < 0 and ~request >= start:  # releases an entry of the same step
            request -= offset
        elif request < 0 and ~request in successors:  # releases one of the step before
            request = ~(successors[~request] + offset - period)
        repeated.append(request)
    return repeated, start + offset


def match_carried_entries(
    requests: Sequence[int], start: int, streams: Sequence[int] = ()
) -> dict[int, int] | None:
    """The blocks that a steady step takes over from the step before, matched with those that it
    leaves to the next: {entry that the step releases: its successor, an entry of the step that
    lives on}.

    The n-th block that it leaves succeeds the n-th one that it takes over. None where it leaves
    more or other blocks than it takes over, so that the step is not steady.
    """
    released = {~request for request in requests[start:] if request < 0}
    taken_over = sorted(entry for entry in released if entry < start and requests[entry])
    passed_on = [i for i in range(start, len(requests)) if requests[i] > 0 and i not in released]
    if [requests[i] for i in taken_over] != [requests[i] for i in passed_on]:
        return None
    if streams and [streams[i] for i in taken_over] != [streams[i] for i in passed_on]:
        return None
    return dict(zip(taken_over, passed_on, strict=True))


class Player:
    """Plays entries through an allocator and records what became of them, in units.

    `blocks` has the block that each entry got or gave back. `reservations` has each change of the
    reserved memory as (entry, bytes of each stream after it). `grown_at` has the last entry at
    which each pool took memory from the driver: small and large of stream 0, then of stream 1 …
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

    def begin(self, requests: Sequence[int], steady_entry: int, emptied: Sequence[int]) -> None:
        """Plays the entries before the steady step. Raises OutOfMemoryError."""
        start = 0
        for entry in emptied:
            self.play(requests[start:entry], start)
            self.empty_cache()
            start = entry
        self.play(requests[start:steady_entry], start)
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

    def empty_cache(self) -> None:
        """As `torch.cuda.empty_cache()`, before the next entry."""
        self.allocator.empty_cache()
        self.reserved = self.allocator.reserved_units
        if self.blocks:
            entry = len(self.blocks) - 1
            self.reservations.append((entry, self.allocator.reserved_by_stream))

    def trace_reserved(self, num_entries: int) -> list[tuple[int, ...]]:
        """The bytes that each stream has reserved before the first entry, and after each."""
        trace = [(0,) * len(self.allocator.small)]
        for entry, by_stream in [*self.reservations, (num_entries, ())]:
            trace += [trace[-1]] * (entry + 1 - len(trace))
            trace.append(by_stream)
        return trace[:-1]

    def play(self, requests: Sequence[int], start: int) -> None:
        """Plays further requests; the first of them is entry `start`. Raises OutOfMemoryError.

        Nearly every request finds a cached block. With torch's default options this loop takes it
        out of the pool in place: a call for each request would take a third longer.
        """
        allocator, blocks, allocated = self.allocator, self.blocks, self.allocated
        small, large, takes_best_fit = allocator.small, allocator.large, allocator.takes_best_fit
        peak = self.peak_allocated
        streams = self.streams[start : start + len(requests)] or repeat(0)
        for request, stream in zip(requests, streams, strict=False):
            if request <= 0:
                block = blocks[~request] if request else _NO_BLOCK
                size = block[1]
                if size:
                    allocated -= size
                    (small[stream] if size <= SMALL else large[stream]).merge(*block)
                blocks.append(block)
                continue
            units = (request + UNIT_BYTES - 1) >> UNIT_BITS
            pool = small[stream] if units <= SMALL else large[stream]
            ordered = pool.ordered
            index = bisect_left(ordered, units << ADDRESS_BITS)
            if takes_best_fit and index < len(ordered):
                packed = ordered[index]
                address, size = packed & ADDRESS_MASK, packed >> ADDRESS_BITS
                if address + size in pool.unmapped:  # at the growing end: another may fit better
                    packed = ordered[index := pool.best_fit(units)]
                    address, size = packed & ADDRESS_MASK, packed >> ADDRESS_BITS
                del pool.starts[address]
                remaining = size - units
                if remaining < pool.min_rest:  # the request gets the whole block
                    del pool.ends[address + size], ordered[index]
                    block = address, size
                else:  # it gets the front, and the rest stays free, at a smaller block's index
                    first = address + units
                    pool.starts[first] = pool.ends[address + size] = remaining
                    packed = remaining << ADDRESS_BITS | first
                    if index and ordered[index - 1] > packed:
                        del ordered[index]
                        insort(ordered, packed, 0, index)
                    else:
                        ordered[index] = packed
                    block = address, units
            else:
                block = allocator.allocate(request, stream)
                if allocator.reserved_units != self.reserved:
                    self._note_reserved(block, stream)
            blocks.append(block)
            allocated += block[1]
            if allocated > peak:
                peak = allocated
        self.allocated, self.peak_allocated = allocated, peak

    def play_again(self, requests: Sequence[int], start: int, successors: dict[int, int]) -> None:
        """Plays the requests from entry `start` on once more, until the remaining ones must recur.

        They must once every live block lies where its counterpart lay one step before, and nothing
        was taken from the driver since: the live blocks determine the free ones.
        `num_moved` counts the live blocks that lie elsewhere.
        """
        blocks, count = self.blocks, len(requests)
        repeated, _ = repeat_step(requests, start, successors, 1)
        self.streams = [*self.streams, *self.streams[start:]]
        num_moved = sum(blocks[entry] != blocks[later] for entry, later in successors.items())
        for entry in range(start, count, _CHUNK_LENGTH):
            if not num_moved and max(self.grown_at) < entry:
                growth = max(trace_allocated(requests[entry:], blocks[entry:count])) >> UNIT_BITS
                self.peak_allocated = max(self.peak_allocated, self.allocated + growth)
                break
            chunk = repeated[entry - start : entry - start + _CHUNK_LENGTH]
            self.play(chunk, len(blocks))
            counterparts = blocks[entry : entry + len(chunk)]
            for request, block, counterpart in zip(
                chunk, blocks[-len(chunk) :], counterparts, strict=True
            ):
                if block != counterpart:
                    num_moved += 1 if request > 0 else -1

    def _note_reserved(self, block: Block, stream: int) -> None:
        """The request of `stream` that got `block` changed the reserved memory."""
        entry = len(self.blocks)
        self.reserved = self.allocator.reserved_units
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.reservations.append((entry, self.allocator.reserved_by_stream))
        self.grown_at[2 * stream + (block[1] > SMALL)] = entry
