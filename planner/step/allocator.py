"""The CUDA caching allocator's rules, and their replay over a sequence of requests and releases.

`torch.cuda.memory_allocated()` counts blocks and `memory_reserved()` counts segments, and neither
follows from the sizes of the tensors alone: a block may be up to 1 MiB larger than its request, and
a segment goes back to the driver only when memory runs out. So the sequence is played through the
allocator's own rules, quoted from PyTorch's c10/cuda/CUDACachingAllocator.cpp and
c10/core/AllocatorConfig.h (constants: torch 2.13's header; search, split, merge and release: the
2.7 sources, which later versions kept; `large_segment_size` and `max_non_split_rounding`: 2.13) and
held against recorded traces of real GPUs (tests/step/test_snapshot.py). One stream is modelled, as
a training step on one device uses one.

Sizes and addresses are counted in units of 512 B, the smallest block. A block is one integer,
`units << ADDRESS_BITS | address`: comparing two compares size, then address, as the allocator's
BlockComparatorSize does, so that best fit is a bisection of a sorted list.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from planner.step.allocator_config import AllocatorConfig, parse_allocator_config
from planner.step.ledger import Allocated, Freed, Ledger

__all__ = [
    "AllocatorConfig",
    "CachingAllocator",
    "OutOfMemoryError",
    "Replay",
    "ledger_requests",
    "parse_allocator_config",
    "replay",
]

MIB = 1024**2
UNIT_BITS = 9
UNIT_BYTES = 1 << UNIT_BITS  # kMinBlockSize
SMALL_BYTES = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own …
ROUND_LARGE_BYTES = 2 * MIB  # … rounded up to kRoundLarge

ADDRESS_BITS = 44
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1
_SMALL = SMALL_BYTES >> UNIT_BITS
_SMALL_SEGMENT = SMALL_SEGMENT_BYTES >> UNIT_BITS
_MIN_LARGE = MIN_LARGE_BYTES >> UNIT_BITS
_ROUND_LARGE = ROUND_LARGE_BYTES >> UNIT_BITS
_FIRST_LARGE = (_SMALL + 1) << ADDRESS_BITS  # every block of the large pool is at least this
# Blocks of the private pool lie above this address, which is how a release finds its pool.
_PRIVATE_BASE = 1 << (ADDRESS_BITS - 1)
# Address space of one expandable segment. The allocator takes 9/8 of the device's memory; here it
# only has to be more than any device has.
_VIRTUAL_UNITS = 1 << 34
_NO_LIMIT = 1 << 62


class OutOfMemoryError(Exception):
    """The driver has no segment left to give, not even after the cached ones were returned."""


class Pool:
    """The free blocks of one pool: sorted for best fit, and by both their ends for merging.

    A block is split when at least `min_rest` units remain and less than `max_split` is asked for;
    `page` is what an expandable segment grows by.
    """

    __slots__ = (
        "blocks", "ends", "is_small", "lookups", "max_split", "min_rest", "page", "segments",
        "starts", "unmapped",
    )  # fmt: skip

    def __init__(self, *, is_small: bool, page: int, min_rest: int, max_split: int) -> None:
        self.is_small = is_small
        self.page = page
        self.min_rest = min_rest
        self.max_split = max_split
        self.blocks: list[int] = []
        self.starts: dict[int, int] = {}  # address -> the free block there
        self.ends: dict[int, int] = {}  # address just past it -> the free block before
        self.segments: dict[int, int] = {}  # address -> units, of segments taken from the driver
        self.unmapped: dict[int, int] = {}  # address -> units, of expandable segments
        self.lookups = 0

    def add(self, block: int) -> None:
        address = block & ADDRESS_MASK
        insort(self.blocks, block)
        self.starts[address] = block
        self.ends[address + (block >> ADDRESS_BITS)] = block

    def remove(self, block: int) -> None:
        address = block & ADDRESS_MASK
        del self.blocks[bisect_left(self.blocks, block)]
        del self.starts[address]
        del self.ends[address + (block >> ADDRESS_BITS)]

    def merge(self, block: int) -> int:
        """Add a block, joined with the free blocks on its two sides; returns what came of it."""
        address = block & ADDRESS_MASK
        end = address + (block >> ADDRESS_BITS)
        after = self.starts.pop(end, None)
        before = self.ends.pop(address, None)
        if after is not None:
            del self.blocks[bisect_left(self.blocks, after)]
            end += after >> ADDRESS_BITS
        if before is not None:
            del self.blocks[bisect_left(self.blocks, before)]
            address = before & ADDRESS_MASK
        if after is not None or before is not None:
            block = (end - address) << ADDRESS_BITS | address
        self.starts[address] = block
        self.ends[end] = block
        insort(self.blocks, block)
        return block

    def whole_segments(self) -> list[int]:
        """Free blocks that are a whole segment of the driver's, which alone can be given back."""
        segments = self.segments
        return [b for b in self.blocks if segments.get(b & ADDRESS_MASK) == b >> ADDRESS_BITS]


class CachingAllocator:
    """The allocator's state: which blocks are free, and what was taken from the driver.

    `capacity_bytes` is what the driver can give this process beyond its context, `allowed_bytes`
    the cap of `torch.cuda.set_per_process_memory_fraction`, without which torch does not collect
    garbage either. Without both, memory never runs out.

    Addresses are invented: each segment lies above all earlier ones. Of blocks of one size the
    lowest is taken, so a driver that hands out addresses in another order may end elsewhere.
    """

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        *,
        capacity_bytes: int | None = None,
        allowed_bytes: int | None = None,
    ) -> None:
        config = config or AllocatorConfig()
        self.reserved_units = 0
        self.num_segments = 0
        self.num_alloc_retries = 0
        self._expandable = config.expandable_segments
        self._capacity = _units_within(capacity_bytes)
        self._allowed = _units_within(allowed_bytes)
        self._max_split = _units_within(config.max_split_bytes)
        self._max_rounding = config.max_non_split_rounding_bytes >> UNIT_BITS
        self._large_segment = config.large_segment_bytes >> UNIT_BITS
        self._divisions = config.roundup_power2_divisions
        threshold = config.garbage_collection_threshold
        self._collects = bool(threshold) and allowed_bytes is not None
        self._gc_units = threshold * self._allowed if self._collects else 0.0
        # Whether the best fit may be refused or passed over.
        self._selective = self._expandable or self._collects or config.max_split_bytes is not None
        self._born: dict[int, int] = {}  # free block -> its pool's lookups when it became free
        self._default_pools = self._new_pools()
        self._private_pools: tuple[Pool, Pool] | None = None
        self._small, self._large = self._default_pools
        self._next_address = 0
        self._next_private_address = _PRIVATE_BASE

    @property
    def reserved_bytes(self) -> int:
        """All memory taken from the driver, as `torch.cuda.memory_reserved()`."""
        return self.reserved_units << UNIT_BITS

    def allocate(self, num_bytes: int) -> int:
        """The block that serves a request of `num_bytes` > 0. Raises OutOfMemoryError."""
        if self._divisions:
            num_bytes = _round_to_division(num_bytes, self._divisions)
        units = (num_bytes + 511) >> UNIT_BITS
        pool = self._small if units <= _SMALL else self._large
        blocks = pool.blocks
        index = bisect_left(blocks, units << ADDRESS_BITS)
        if self._selective:
            index = self._select(pool, units, index)
        if index < len(blocks):
            block = blocks.pop(index)
            address = block & ADDRESS_MASK
            size = block >> ADDRESS_BITS
            del pool.starts[address]
            del pool.ends[address + size]
        else:
            block = self._obtain(pool, units)
            address = block & ADDRESS_MASK
            size = block >> ADDRESS_BITS
        if size == units:
            return block
        rest = size - units
        if rest < pool.min_rest or units >= pool.max_split:
            return block
        remaining = rest << ADDRESS_BITS | (address + units)
        pool.starts[address + units] = remaining
        pool.ends[address + size] = remaining
        insort(blocks, remaining)
        if self._collects:
            self._born[remaining] = pool.lookups
        return units << ADDRESS_BITS | address

    def free(self, block: int) -> None:
        """Take back a block that `allocate` gave."""
        # The size tells the pool: blocks of the small pool are split to 512 B, so none of those
        # handed out is above 1 MiB, and none of the large pool's is below.
        pools = self._default_pools
        if block & _PRIVATE_BASE:
            assert self._private_pools is not None
            pools = self._private_pools
        pool = pools[block >= _FIRST_LARGE]
        block = pool.merge(block)
        if self._collects:
            self._born[block] = pool.lookups

    def empty_cache(self) -> None:
        """Return every segment that is wholly free to the driver, as `torch.cuda.empty_cache()`.
        The private pool keeps its own."""
        for pool in reversed(self._default_pools):
            for block in pool.whole_segments():
                self._release(pool, block)
            if pool.unmapped:
                for block in list(pool.blocks):
                    self._unmap(pool, block)

    def begin_capture(self) -> None:
        """From here on serve requests from a private pool, as while a CUDA graph is captured."""
        self._private_pools = self._private_pools or self._new_pools()
        self._small, self._large = self._private_pools

    def end_capture(self) -> None:
        """Serve requests from the common pools again. The private pool keeps what it took."""
        self._small, self._large = self._default_pools

    def _new_pools(self) -> tuple[Pool, Pool]:
        exact = self._expandable
        small = Pool(is_small=True, page=_SMALL_SEGMENT, min_rest=1, max_split=_NO_LIMIT)
        large = Pool(
            is_small=False,
            page=self._large_segment,
            min_rest=1 if exact else _SMALL + 1,
            max_split=_NO_LIMIT if exact else self._max_split,
        )
        return small, large

    def _select(self, pool: Pool, units: int, index: int) -> int:
        """`get_free_block` where options bend best fit: the index of the block to take, or past
        the end."""
        blocks = pool.blocks
        if self._collects:
            pool.lookups += 1
        if index == len(blocks):
            return index
        if self._expandable:
            # A block at the growing end counts as large as it can become, so that it comes last.
            while index + 1 < len(blocks) and self._expandable_size(
                pool, blocks[index + 1]
            ) < self._expandable_size(pool, blocks[index]):
                index += 1
        size = blocks[index] >> ADDRESS_BITS
        if units < self._max_split <= size:
            return len(blocks)
        if units >= self._max_split and size >= units + self._max_rounding:
            return len(blocks)
        return index

    def _expandable_size(self, pool: Pool, block: int) -> int:
        size = block >> ADDRESS_BITS
        return size + pool.unmapped.get((block & ADDRESS_MASK) + size, 0)

    def _obtain(self, pool: Pool, units: int) -> int:
        """A block from the driver, for which cached segments may have to go. Not yet split."""
        if self._collects:
            self._collect_garbage()
        block = self._grow(pool, units)
        if block is None and self._release_oversize(pool, units):
            block = self._grow(pool, units)
        if block is None and pool in self._default_pools:
            # Nothing may be released to the driver during a capture.
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._grow(pool, units)
        if block is None:
            raise OutOfMemoryError(f"no segment for a block of {units << UNIT_BITS} bytes")
        return block

    def _grow(self, pool: Pool, units: int) -> int | None:
        """A fresh block of `units` or more from the driver, or None when it has no more."""
        segment = self._segment_units(units)
        if self.reserved_units + segment > self._allowed:
            return None
        if self._expandable:
            return self._expand(pool, units)
        if self.reserved_units + segment > self._capacity:
            return None
        address = self._new_address(segment, pool)
        pool.segments[address] = segment
        self.reserved_units += segment
        self.num_segments += 1
        return segment << ADDRESS_BITS | address

    def _segment_units(self, units: int) -> int:
        """`get_allocation_size`."""
        if units <= _SMALL:
            return _SMALL_SEGMENT
        if units < _MIN_LARGE:
            return self._large_segment
        return -(-units // _ROUND_LARGE) * _ROUND_LARGE

    def _new_address(self, units: int, pool: Pool) -> int:
        """Where a segment begins. A gap keeps blocks of two segments from being neighbours."""
        if pool in self._default_pools:
            address = self._next_address
            self._next_address += units + 1
        else:
            address = self._next_private_address
            self._next_private_address += units + 1
        return address

    def _release(self, pool: Pool, block: int) -> None:
        """Give a whole segment back to the driver."""
        pool.remove(block)
        self.reserved_units -= pool.segments.pop(block & ADDRESS_MASK)
        self.num_segments -= 1

    def _release_oversize(self, pool: Pool, units: int) -> bool:
        """Under max_split_size, return as many unsplittable segments as make room; whether enough
        were found."""
        if self._max_split == _NO_LIMIT or self._expandable:
            return False
        wanted = max(units, self._max_split)
        blocks = pool.blocks
        index = bisect_left(blocks, wanted << ADDRESS_BITS)
        if index < len(blocks):
            self._release(pool, blocks[index])
            return True
        released = 0
        while blocks and released < wanted and blocks[-1] >> ADDRESS_BITS >= self._max_split:
            released += blocks[-1] >> ADDRESS_BITS
            self._release(pool, blocks[-1])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Return the large segments that lay free longest, until reserved memory is under the
        threshold or none is left. Age is counted in searches of the pool."""
        if self.reserved_units <= self._gc_units:
            return
        pool = self._default_pools[1]
        target = self.reserved_units - int(self._gc_units)
        free = pool.whole_segments()
        ages = {block: pool.lookups - self._born[block] for block in free}
        reclaimed = 0
        while ages and reclaimed < target:
            total = sum(ages.values())
            count = len(ages)
            threshold = total / count
            for block in [b for b, age in ages.items() if age >= threshold]:
                reclaimed += block >> ADDRESS_BITS
                del ages[block]
                self._release(pool, block)

    # Expandable segments: one range of addresses per pool, of which pages are mapped as needed.

    def _expand(self, pool: Pool, units: int) -> int | None:
        """`try_allocate_expandable_block`: map pages at the lowest address where free and unmapped
        memory together have room."""
        address = self._find_room(pool, units)
        block = pool.starts.get(address)
        if block is None:
            block = self._map(pool, address, min(units, pool.unmapped[address]))
        while block is not None and block >> ADDRESS_BITS < units:
            size = block >> ADDRESS_BITS
            end = (block & ADDRESS_MASK) + size
            block = self._map(pool, end, min(units - size, pool.unmapped[end]))
        if block is not None:
            pool.remove(block)
        return block

    def _find_room(self, pool: Pool, units: int) -> int:
        for address in sorted(pool.unmapped):
            before = pool.ends.get(address)
            first = address if before is None else before & ADDRESS_MASK
            if self._has_room(pool, first, units):
                return first
        address = -(-self._new_address(_VIRTUAL_UNITS, pool) // pool.page) * pool.page
        room = _VIRTUAL_UNITS // pool.page * pool.page - pool.page
        pool.unmapped[address] = room
        self.num_segments += 1
        return address

    def _has_room(self, pool: Pool, address: int, units: int) -> bool:
        while units > 0:
            size = pool.starts.get(address, 0) >> ADDRESS_BITS or pool.unmapped.get(address, 0)
            if not size:
                return False
            address += size
            units -= size
        return True

    def _map(self, pool: Pool, address: int, units: int) -> int | None:
        """Back the addresses from `address` on with whole pages, and merge them with the free
        blocks beside them; None when the driver has no page left."""
        mapped = -(-units // pool.page) * pool.page
        if self.reserved_units + mapped > self._capacity:
            return None
        rest = pool.unmapped.pop(address) - mapped
        if rest:
            pool.unmapped[address + mapped] = rest
        self.reserved_units += mapped
        return pool.merge(mapped << ADDRESS_BITS | address)

    def _unmap(self, pool: Pool, block: int) -> None:
        """Give back the pages that lie wholly within a free block."""
        start = block & ADDRESS_MASK
        end = start + (block >> ADDRESS_BITS)
        first = -(-start // pool.page) * pool.page
        last = end // pool.page * pool.page
        if first >= last:
            return
        pool.remove(block)
        if first > start:
            pool.add((first - start) << ADDRESS_BITS | start)
        if end > last:
            pool.add((end - last) << ADDRESS_BITS | last)
        self.reserved_units -= last - first
        last += pool.unmapped.pop(last, 0)
        for address, units in pool.unmapped.items():
            if address + units == first:
                pool.unmapped[address] = last - address
                return
        pool.unmapped[first] = last - first


def _units_within(num_bytes: int | None) -> int:
    return _NO_LIMIT if num_bytes is None else num_bytes >> UNIT_BITS


def _round_to_division(num_bytes: int, divisions: Sequence[int]) -> int:
    """`round_size` under roundup_power2_divisions: the way from one power of two to the next in as
    many steps as the divisions of its interval (1 MiB and below, 2 MiB, … 32 GiB and above)."""
    interval = min(max(num_bytes.bit_length() - 21, 0), len(divisions) - 1)
    steps = divisions[interval]
    if steps <= 1 or num_bytes <= UNIT_BYTES * steps:
        return num_bytes
    step = (1 << (num_bytes.bit_length() - 1)) // steps
    return -(-num_bytes // step) * step


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
    blocks = [0] * len(requests)
    units = [0] * len(requests)
    reservations: list[tuple[int, int]] = []
    out_of_memory_at = None
    for start, stop, capturing in _stretches(len(requests), captured):
        if capturing:
            allocator.begin_capture()
        else:
            allocator.end_capture()
        out_of_memory_at = _play(requests, start, stop, allocator, blocks, units, reservations)
        if out_of_memory_at is not None:
            del units[out_of_memory_at:]
            break
    return _summarize(units, reservations, steady_from, allocator, out_of_memory_at)


def _stretches(num_requests: int, captured: tuple[int, int] | None) -> list[tuple[int, int, bool]]:
    if captured is None:
        return [(0, num_requests, False)]
    start, stop = captured
    return [(0, start, False), (start, stop, True), (stop, num_requests, False)]


def _play(
    requests: Sequence[int],
    start: int,
    stop: int,
    allocator: CachingAllocator,
    blocks: list[int],
    units: list[int],
    reservations: list[tuple[int, int]],
) -> int | None:
    """Play requests[start:stop]; fills `blocks`, `units` and `reservations` and returns the entry
    at which memory ran out, if it did. This loop is most of the time of a replay."""
    allocate, free = allocator.allocate, allocator.free
    reserved = allocator.reserved_units
    index = start
    try:
        for index in range(start, stop):
            request = requests[index]
            if request > 0:
                blocks[index] = block = allocate(request)
                units[index] = block >> ADDRESS_BITS
                if allocator.reserved_units != reserved:
                    reserved = allocator.reserved_units
                    reservations.append((index, reserved << UNIT_BITS))
            elif request:
                block = blocks[~request]
                if block:
                    free(block)
                    units[index] = -(block >> ADDRESS_BITS)
    except OutOfMemoryError:
        return index
    return None


def _summarize(
    units: list[int],
    reservations: list[tuple[int, int]],
    steady_from: int,
    allocator: CachingAllocator,
    out_of_memory_at: int | None,
) -> Replay:
    running = list(accumulate(units)) or [0]
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
        reserved_bytes=allocator.reserved_bytes,
        num_segments=allocator.num_segments,
        num_alloc_retries=allocator.num_alloc_retries,
        out_of_memory_at=out_of_memory_at,
        block_units=tuple(units),
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
