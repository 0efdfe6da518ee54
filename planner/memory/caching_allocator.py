"""The CUDA caching allocator's rules: which block serves a request, and which segments it takes
from the driver and gives back. First `Pool`, the free blocks of one pool, then `CachingAllocator`.

Quoted from PyTorch's c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h: constants
from torch 2.13's own header; search, split, merge, release and expandable segments from the 2.7
sources, which later versions kept. Held to torch's own allocator on an emulated GPU, request by
request (tests/emulated/test_on_torch.py).

A block belongs to the CUDA stream it was allocated on and serves only requests of that stream:
each stream has a small and a large pool of its own, with segments (expandable ones too) that no
other stream takes from. All streams share what the driver has left: the limit, and the return of
all cached segments before memory runs out. An oversize block is returned only in favour of its own
stream. Streams are numbered; 0 is the one that computes.

Sizes and addresses are counted in units of 512 B, the smallest block.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from planner.core.units import MIB
from planner.memory.allocator_config import LARGE_SEGMENT_BYTES, AllocatorConfig

UNIT_BITS = 9
UNIT_BYTES = 1 << UNIT_BITS  # kMinBlockSize
SMALL_BYTES = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: a request from here on gets a segment of its own …
ROUND_LARGE_BYTES = 2 * MIB  # … rounded up to a multiple of kRoundLarge

SMALL = SMALL_BYTES >> UNIT_BITS
SMALL_SEGMENT = SMALL_SEGMENT_BYTES >> UNIT_BITS
MIN_LARGE = MIN_LARGE_BYTES >> UNIT_BITS
ROUND_LARGE = ROUND_LARGE_BYTES >> UNIT_BITS
LARGE_SEGMENT = LARGE_SEGMENT_BYTES >> UNIT_BITS
MAX_ROUNDING = 20 * MIB >> UNIT_BITS  # max_non_split_rounding_mb, torch's default
# Address space of one expandable segment. The allocator reserves 9/8 of the device's memory; here
# any size will do that is more than any device has.
_VIRTUAL_UNITS = 1 << 34
_NO_LIMIT = 1 << 256  # units: beyond the largest sizes that a setting may have
ADDRESS_BITS = 128
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1

Block = tuple[int, int]  # address and size, in units


class OutOfMemoryError(Exception):
    """The driver has no segment left, not even after the cached ones were returned."""


def round_request(num_bytes: int) -> int:
    """The bytes that the allocator counts for a request: a multiple of 512 B."""
    return -(-num_bytes >> UNIT_BITS) << UNIT_BITS


class Pool:
    """The free blocks of one pool: in the allocator's order, and by both their ends for merging.

    The allocator orders blocks by size, then by address. `ordered` packs each block into one
    number: its size, shifted left by ADDRESS_BITS, and its address. A block is split when at least
    `min_rest` units remain and the request is below `max_split`. An expandable segment grows
    by `page`.
    """

    __slots__ = (
        "ends", "max_split", "min_rest", "ordered", "page", "reserved_units", "segments",
        "starts", "unmapped",
    )  # fmt: skip

    def __init__(self, *, page: int, min_rest: int, max_split: int) -> None:
        self.page = page
        self.min_rest = min_rest
        self.max_split = max_split
        self.ordered: list[int] = []
        self.starts: dict[int, int] = {}  # address -> size of the free block there
        self.ends: dict[int, int] = {}  # end address -> size of the free block before it
        self.segments: dict[int, int] = {}  # address -> size of a segment from the driver
        self.unmapped: dict[int, int] = {}  # address -> size of an unmapped range
        self.reserved_units = 0  # taken from the driver

    def add(self, address: int, size: int) -> None:
        """Adds a free block as it is, without merging."""
        self.starts[address] = size
        self.ends[address + size] = size
        insort(self.ordered, size << ADDRESS_BITS | address)

    def remove(self, address: int, size: int) -> None:
        del self.starts[address]
        del self.ends[address + size]
        del self.ordered[bisect_left(self.ordered, size << ADDRESS_BITS | address)]

    def merge(self, address: int, size: int) -> Block:
        """Adds a free block, merged with the free blocks before and after it. Returns the
        result."""
        ordered = self.ordered
        end = address + size
        after = self.starts.pop(end, 0)
        if after:
            del ordered[bisect_left(ordered, after << ADDRESS_BITS | end)]
            size += after
            end += after
        before = self.ends.pop(address, 0)
        if before:
            address -= before
            del ordered[bisect_left(ordered, before << ADDRESS_BITS | address)]
            size += before
        self.starts[address] = self.ends[end] = size
        insort(ordered, size << ADDRESS_BITS | address)
        return address, size

    def best_fit(self, units: int) -> int:
        """The index in `ordered` of the smallest block of `units` or more; its length without one.
        A block at the growing end counts as large as it can become, so that it comes last."""
        ordered, unmapped = self.ordered, self.unmapped
        best = bisect_left(ordered, units << ADDRESS_BITS)
        if unmapped and best < len(ordered):
            address, size = ordered[best] & ADDRESS_MASK, ordered[best] >> ADDRESS_BITS
            best_reach = size + unmapped.get(address + size, 0)
            for index in range(best + 1, len(ordered) if best_reach > size else 0):
                address, size = ordered[index] & ADDRESS_MASK, ordered[index] >> ADDRESS_BITS
                reach = size + unmapped.get(address + size, 0)
                if reach >= best_reach:
                    break
                best, best_reach = index, reach
        return best

    def blocks_from(self, size: int) -> Iterator[Block]:
        """The free blocks of at least `size`, in the allocator's order."""
        ordered = self.ordered
        for index in range(bisect_left(ordered, size << ADDRESS_BITS), len(ordered)):
            yield ordered[index] & ADDRESS_MASK, ordered[index] >> ADDRESS_BITS

    def whole_segments(self) -> list[Block]:
        """The free blocks that are a whole segment; only these can go back to the driver."""
        starts = self.starts
        return [(a, size) for a, size in self.segments.items() if starts.get(a) == size]


class CachingAllocator:
    """The allocator's state: which blocks are free, and which segments the driver gave.

    The driver has `allowed_bytes`; with None memory never runs out.

    Addresses are invented: each segment lies above all earlier ones. Of several blocks of one size
    the lowest is taken, so that another order of addresses may lead to other blocks.
    """

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        *,
        allowed_bytes: int | None = None,
        num_streams: int = 1,
    ) -> None:
        config = config or AllocatorConfig()
        self.reserved_units = 0  # of all streams, as `torch.cuda.memory_reserved()` counts in bytes
        self.num_alloc_retries = 0
        self._expandable = config.expandable_segments
        self._allowed = _NO_LIMIT if allowed_bytes is None else allowed_bytes >> UNIT_BITS
        max_split = config.max_split_bytes
        self._max_split = _NO_LIMIT if max_split is None else max_split >> UNIT_BITS
        streams = range(num_streams)
        self.small = [Pool(page=SMALL_SEGMENT, min_rest=1, max_split=_NO_LIMIT) for _ in streams]
        self.large = [
            Pool(
                page=LARGE_SEGMENT,
                min_rest=1 if self._expandable else SMALL + 1,
                max_split=_NO_LIMIT if self._expandable else self._max_split,
            )
            for _ in streams
        ]
        self._next_address = 0
        # Without the option a request always takes the best fit.
        self.takes_best_fit = self._max_split == _NO_LIMIT

    @property
    def reserved_by_stream(self) -> tuple[int, ...]:
        """The bytes taken from the driver, by the number of the stream."""
        pairs = zip(self.small, self.large, strict=True)
        return tuple((s.reserved_units + g.reserved_units) << UNIT_BITS for s, g in pairs)

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """The block that serves a request of `num_bytes` > 0 on `stream`. Raises
        OutOfMemoryError."""
        units = (num_bytes + UNIT_BYTES - 1) >> UNIT_BITS
        pool = (self.small if units <= SMALL else self.large)[stream]
        free_block = self._find_free_block(pool, units)
        if free_block is not None:
            pool.remove(*free_block)
        return self._split(pool, free_block or self._take_segment(pool, units), units)

    def free(self, block: Block, stream: int = 0) -> None:
        """Takes back a block that `allocate` gave on `stream`."""
        address, size = block
        # The size tells the pool: the small pool splits its blocks to 512 B, so that it hands out
        # none above 1 MiB, and the large pool none below.
        pool = (self.small if size <= SMALL else self.large)[stream]
        pool.merge(address, size)

    def empty_cache(self) -> None:
        """Returns the wholly free segments of all streams to the driver, as
        `torch.cuda.empty_cache()`."""
        for pool in (*self.large, *self.small):
            for address, size in pool.whole_segments():
                self._release(pool, address, size)
            if pool.unmapped:
                for address, size in list(pool.blocks_from(0)):
                    self._unmap(pool, address, size)

    def _split(self, pool: Pool, block: Block, units: int) -> Block:
        """The part of `block` that a request of `units` gets; what remains becomes a free block.
        `block` itself is not among the free ones."""
        address, size = block
        remaining = size - units
        if remaining < pool.min_rest or units >= pool.max_split:
            return block
        pool.add(address + units, remaining)
        return address, units

    def _find_free_block(self, pool: Pool, units: int) -> Block | None:
        """`get_free_block`: the best fit, which max_split_size may refuse."""
        index = pool.best_fit(units)
        if index == len(pool.ordered):
            return None
        number = pool.ordered[index]
        size = number >> ADDRESS_BITS
        if units < self._max_split <= size:
            return None
        if units >= self._max_split and size >= units + MAX_ROUNDING:
            return None
        return number & ADDRESS_MASK, size

    def _take_segment(self, pool: Pool, units: int) -> Block:
        """A block from the driver, not yet split. Cached segments may have to go for it."""
        block = self._grow(pool, units)
        if block is None and self._release_oversize(pool, units):
            block = self._grow(pool, units)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._grow(pool, units)
        if block is None:
            raise OutOfMemoryError(f"no segment for a block of {units << UNIT_BITS} bytes")
        return block

    def _grow(self, pool: Pool, units: int) -> Block | None:
        """A fresh block of `units` or more from the driver; None if it has too little left."""
        if self._expandable:
            return self._expand(pool, units)
        segment = self._segment_units(units)
        if self.reserved_units + segment > self._allowed:
            return None
        address = self._new_address(segment)
        pool.segments[address] = segment
        self._reserve(pool, segment)
        return address, segment

    def _reserve(self, pool: Pool, units: int) -> None:
        """Counts the `units` that the driver gave; below 0, that it got back."""
        pool.reserved_units += units
        self.reserved_units += units

    def _segment_units(self, units: int) -> int:
        """`get_allocation_size`."""
        if units <= SMALL:
            return SMALL_SEGMENT
        if units < MIN_LARGE:
            return LARGE_SEGMENT
        return -(-units // ROUND_LARGE) * ROUND_LARGE

    def _new_address(self, units: int) -> int:
        """The address of a new segment. A gap keeps blocks of two segments from being merged."""
        address = self._next_address
        self._next_address += units + 1
        return address

    def _release(self, pool: Pool, address: int, size: int) -> None:
        """Gives a whole segment back to the driver."""
        pool.remove(address, size)
        del pool.segments[address]
        self._reserve(pool, -size)

    def _release_oversize(self, pool: Pool, units: int) -> bool:
        """Under max_split_size, returns as many unsplittable segments as make room. Returns whether
        there were enough."""
        if self._max_split == _NO_LIMIT or self._expandable:
            return False
        needed = max(units, self._max_split)
        block = next(pool.blocks_from(needed), None)
        if block is not None:
            self._release(pool, *block)
            return True
        released = 0
        for address, size in reversed(list(pool.blocks_from(self._max_split))):
            if released >= needed:
                break
            released += size
            self._release(pool, address, size)
        return released >= needed

    # Expandable segments: one range of addresses per pool, whose pages are mapped as needed.

    def _expand(self, pool: Pool, units: int) -> Block | None:
        """`try_allocate_expandable_block`: maps pages at the lowest address where free and unmapped
        memory together have room. None if the driver has too few (the mapped ones stay)."""
        address = self._find_room(pool, units)
        block: Block = address, pool.starts.get(address, 0)
        while block[1] < units:
            end = block[0] + block[1]
            missing = min(units - block[1], pool.unmapped[end])
            if self.reserved_units + -(-missing // pool.page) * pool.page > self._allowed:
                return None
            block = self._map(pool, end, missing)
        pool.remove(*block)
        return block

    def _find_room(self, pool: Pool, units: int) -> int:
        for address in sorted(pool.unmapped):
            first = address - pool.ends.get(address, 0)
            if _has_room(pool, first, units):
                return first
        page = pool.page
        address = -(-self._new_address(_VIRTUAL_UNITS + page) // page) * page
        pool.unmapped[address] = _VIRTUAL_UNITS // page * page
        return address

    def _map(self, pool: Pool, address: int, units: int) -> Block:
        """Maps whole pages from `address` on, and merges them with the free blocks beside them."""
        mapped = -(-units // pool.page) * pool.page
        remaining = pool.unmapped.pop(address) - mapped
        if remaining:
            pool.unmapped[address + mapped] = remaining
        self._reserve(pool, mapped)
        return pool.merge(address, mapped)

    def _unmap(self, pool: Pool, start: int, size: int) -> None:
        """Gives back the pages that lie wholly within a free block."""
        end = start + size
        first = -(-start // pool.page) * pool.page
        last = end // pool.page * pool.page
        if first >= last:
            return
        pool.remove(start, size)
        if first > start:
            pool.add(start, first - start)
        if end > last:
            pool.add(last, end - last)
        self._reserve(pool, first - last)
        last += pool.unmapped.pop(last, 0)
        for address, units in pool.unmapped.items():
            if address + units == first:
                pool.unmapped[address] = last - address
                return
        pool.unmapped[first] = last - first


def _has_room(pool: Pool, address: int, units: int) -> bool:
    """Whether free and unmapped memory from `address` on adds up to `units`."""
    while units > 0:
        size = pool.starts.get(address) or pool.unmapped.get(address, 0)
        if not size:
            return False
        address += size
        units -= size
    return True
