"""A sequence of requests and releases, played through the CUDA caching allocator's rules.

`torch.cuda.memory_allocated()` counts blocks and `memory_reserved()` counts segments, and neither
follows from the sizes of the tensors alone: a block may be up to 1 MiB larger than its request, and
a segment goes back to the driver only when memory runs out. So the sequence is played out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from planner.ledger import Allocated, Freed, Ledger
from planner.memory.allocator_config import AllocatorConfig, parse_allocator_config
from planner.memory.caching_allocator import (
    MIN_LARGE,
    ROUND_LARGE,
    SMALL,
    SMALL_SEGMENT,
    UNIT_BITS,
    CachingAllocator,
    OutOfMemoryError,
)
from planner.memory.pool_replay import PoolRules, replay_pool

__all__ = [
    "AllocatorConfig",
    "Replay",
    "ledger_requests",
    "parse_allocator_config",
    "plain_pools",
    "repeat_step",
    "replay",
    "replay_steady",
]


@dataclass(frozen=True)
class Replay:
    """What a sequence of requests made of the allocator. Sizes in bytes.

    Peaks are those from `steady_from` on, the memory held there included, as after
    `torch.cuda.reset_peak_memory_stats()`. `peak_index` is the event that first reached
    `peak_allocated_bytes` (-1 when that was held from the start) and `reserved_at_peak_bytes` what
    was reserved then. Where `out_of_memory_at` is an index, the event there could not be served and
    nothing after it was played.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_index: int
    reserved_at_peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    num_segments: int
    num_alloc_retries: int
    out_of_memory_at: int | None
    block_units: tuple[int, ...] = field(repr=False)
    reservations: tuple[tuple[int, int], ...] = field(repr=False)

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved but in no block at the instant most was allocated."""
        return self.reserved_at_peak_bytes - self.peak_allocated_bytes

    def running_allocated_bytes(self) -> list[int]:
        """Bytes allocated after each event played."""
        return [units << UNIT_BITS for units in accumulate(self.block_units)]

    def running_reserved_bytes(self) -> list[int]:
        """Bytes reserved after each event played."""
        running: list[int] = []
        reserved = 0
        for index, after in self.reservations:
            running += [reserved] * (index - len(running))
            reserved = after
        return running + [reserved] * (len(self.block_units) - len(running))


def replay(
    requests: Sequence[int],
    config: AllocatorConfig | None = None,
    *,
    steady_from: int = 0,
    capacity_bytes: int | None = None,
    allowed_bytes: int | None = None,
    captured: tuple[int, int] | None = None,
) -> Replay:
    """Play requests and releases through a fresh allocator.

    An entry n >= 0 of `requests` asks for n bytes (0 takes no memory, as in torch); an entry
    -k - 1, that is `~k`, releases what entry k got. `ledger_requests` makes them of a ledger.
    `steady_from` is the entry from which peaks count. `captured` is a range of entries that one or
    more CUDA graphs capture: they are served from a private pool, which never gives memory back.
    `capacity_bytes` and `allowed_bytes` are those of CachingAllocator.
    """
    allocator = CachingAllocator(config, capacity_bytes=capacity_bytes, allowed_bytes=allowed_bytes)
    unlimited = capacity_bytes is None and allowed_bytes is None
    if allocator.is_plain and unlimited and captured is None:
        return _replay_plain(requests, config or AllocatorConfig(), steady_from)
    played = _Played([0] * len(requests), [0] * len(requests), [])
    for start, stop, capturing in _stretches(len(requests), captured):
        if capturing:
            allocator.begin_capture()
        else:
            allocator.end_capture()
        played.out_of_memory_at = _play(requests, start, stop, allocator, played)
        if played.out_of_memory_at is not None:
            del played.units[played.out_of_memory_at :]
            break
    played.reserved_units = allocator.reserved_units
    played.num_segments = allocator.num_segments
    played.num_alloc_retries = allocator.num_alloc_retries
    return _summarize(played, steady_from)


def replay_steady(
    requests: Sequence[int],
    config: AllocatorConfig | None,
    steady_from: int,
    allowed_bytes: int | None = None,
) -> Replay:
    """What a steady step needs by itself: memory does not run out.

    A limit changes that need only through garbage collection, which torch does where a memory
    fraction was set and never else; a step that cannot live within `allowed_bytes` even so is
    played without it, so that what it needs is known.
    """
    if config is not None and config.garbage_collection_threshold and allowed_bytes is not None:
        held = replay(requests, config, steady_from=steady_from, allowed_bytes=allowed_bytes)
        if held.out_of_memory_at is None:
            return held
    return replay(requests, config, steady_from=steady_from)


def _stretches(num_requests: int, captured: tuple[int, int] | None) -> list[tuple[int, int, bool]]:
    if captured is None:
        return [(0, num_requests, False)]
    start, stop = captured
    return [(0, start, False), (start, stop, True), (stop, num_requests, False)]


@dataclass
class _Played:
    """What became of each entry so far: where its block is, and by how many units it changed what
    is allocated; each change of what is reserved, as (entry, bytes); and how it ended."""

    addresses: list[int]
    units: list[int]
    reservations: list[tuple[int, int]]
    out_of_memory_at: int | None = None
    reserved_units: int = 0
    num_segments: int = 0
    num_alloc_retries: int = 0


def _play(
    requests: Sequence[int], start: int, stop: int, allocator: CachingAllocator, played: _Played
) -> int | None:
    """Play requests[start:stop]; returns the entry at which memory ran out, if it did."""
    addresses, units = played.addresses, played.units
    reserved = allocator.reserved_units
    for index in range(start, stop):
        request = requests[index]
        if request > 0:
            try:
                addresses[index], units[index] = allocator.allocate(request)
            except OutOfMemoryError:
                return index
            if allocator.reserved_units != reserved:
                reserved = allocator.reserved_units
                played.reservations.append((index, reserved << UNIT_BITS))
        elif request and units[~request]:
            allocator.free((addresses[~request], units[~request]))
            units[index] = -units[~request]
    return None


def _replay_plain(requests: Sequence[int], config: AllocatorConfig, steady_from: int) -> Replay:
    """The default options while memory does not run out: each pool by itself, as it is for `_play`
    too; a test holds the two equal."""
    asked = [(n + 511) >> UNIT_BITS if n > 0 else 0 for n in requests]
    asked = [n if n else -asked[~r] if r < 0 else 0 for n, r in zip(asked, requests, strict=True)]
    changes: list[tuple[int, int]] = []
    for rules, low, high in plain_pools(config):
        entries = [i for i, units in enumerate(asked) if low < abs(units) <= high]
        ordinals: dict[int, int] = {}
        events = []
        for entry in entries:
            if asked[entry] > 0:
                ordinals[entry] = len(ordinals)
                events.append(asked[entry])
            else:
                events.append(~ordinals[~requests[entry]])
        found = replay_pool([(events, None)], rules)
        allocated = list(ordinals)
        changes += [(allocated[k], units) for k, units in found.grown]
        larger = {allocated[k]: units for k, units in found.slack}
        for entry in entries if larger else ():
            asked[entry] += larger.get(entry, 0) - larger.get(~requests[entry], 0)
    changes.sort()
    totals = accumulate(units for _, units in changes)
    reservations = [
        (entry, units << UNIT_BITS) for (entry, _), units in zip(changes, totals, strict=True)
    ]
    reserved = sum(units for _, units in changes)
    played = _Played([], asked, reservations, None, reserved, num_segments=len(changes))
    return _summarize(played, steady_from)


def plain_pools(config: AllocatorConfig) -> list[tuple[PoolRules, int, int]]:
    """Both pools under plain options, each with the requests it serves: above the first number of
    units, up to the second."""
    segment = config.large_segment_bytes >> UNIT_BITS
    return [
        (PoolRules(1, SMALL_SEGMENT, SMALL + 1, 1), 0, SMALL),
        (PoolRules(SMALL + 1, segment, MIN_LARGE, ROUND_LARGE), SMALL, 1 << 120),
    ]


def _summarize(played: _Played, steady_from: int) -> Replay:
    reservations = played.reservations
    running = list(accumulate(played.units)) or [0]
    first = min(max(steady_from - 1, 0), len(running) - 1)
    peak = max(running[first:])
    peak_index = running.index(peak, first) if peak else -1
    before = [size for index, size in reservations if index < steady_from][-1:]
    after = [size for index, size in reservations if index >= steady_from]
    return Replay(
        peak_allocated_bytes=peak << UNIT_BITS,
        peak_reserved_bytes=max([*before, *after], default=0),
        peak_index=peak_index,
        reserved_at_peak_bytes=max(
            [size for index, size in reservations if index <= peak_index][-1:], default=0
        ),
        allocated_bytes=running[-1] << UNIT_BITS,
        reserved_bytes=played.reserved_units << UNIT_BITS,
        num_segments=played.num_segments,
        num_alloc_retries=played.num_alloc_retries,
        out_of_memory_at=played.out_of_memory_at,
        block_units=tuple(played.units),
        reservations=tuple(reservations),
    )


def ledger_requests(ledger: Ledger) -> tuple[list[int], list[int]]:
    """A ledger's allocations and releases as `replay` takes them, and for each the index of its
    event in the ledger."""
    requests: list[int] = []
    event_indices: list[int] = []
    positions: dict[int, int] = {}
    for index, event in enumerate(ledger.events):
        if isinstance(event, Allocated):
            positions[event.storage] = len(requests)
            requests.append(event.num_bytes)
        elif isinstance(event, Freed):
            requests.append(~positions.pop(event.storage))
        else:
            continue
        event_indices.append(index)
    return requests, event_indices


def repeat_step(requests: Sequence[int], start: int, times: int = 1) -> list[int]:
    """The requests with those of the steady step, from entry `start` on, `times` times more.

    Reserved bytes can still rise after the second step, as the first left other holes than the
    second does; a device measured after warm-up is past that. What a step releases of the step
    before it, its repetition releases of it: the n-th such block stands for the n-th one that is
    left over. Entry i of a repetition is entry `start + (i - start) % (len(requests) - start)`.

    Raises ValueError where the step leaves more or other blocks than it takes over.
    """
    period = len(requests) - start
    released = {~n for n in requests[start:] if n < 0}
    taken_over = sorted(entry for entry in released if entry < start)
    left = [i for i in range(start, len(requests)) if requests[i] > 0 and i not in released]
    if [requests[i] for i in taken_over if requests[i]] != [requests[i] for i in left]:
        raise ValueError(f"the step takes over {len(taken_over)} blocks and leaves {len(left)}")
    stands_for = dict(zip((i for i in taken_over if requests[i]), left, strict=True))
    repeated = list(requests)
    for shift in range(period, (times + 1) * period, period):
        for entry in requests[start:]:
            if entry >= 0:
                repeated.append(entry)
            elif ~entry >= start:
                repeated.append(entry - shift)
            elif ~entry in stands_for:
                repeated.append(~(stands_for[~entry] + shift - period))
            else:
                repeated.append(0)  # the release of no memory
    return repeated
