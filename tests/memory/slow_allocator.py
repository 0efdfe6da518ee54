"""The allocator's rules once more, slowly and plainly, to hold the fast one against.

Every block is an object in a list; each search looks at all of them, and neighbours are found by
address. It shares no code and no data structure with planner/memory/replay.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1024**2
TOP = 1 << 46


@dataclass
class Block:
    segment: int
    offset: int
    size: int
    small: bool
    free: bool
    stream: int = 0


@dataclass
class SlowAllocator:
    """Default pools, without expandable segments. Raises MemoryError when nothing is left."""

    max_split: int | None = None
    max_rounding: int = 20 * MIB
    capacity: int | None = None
    blocks: list[Block] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    retries: int = 0
    log: list[tuple[str, int, int, int]] = field(default_factory=list)

    def reserved(self) -> int:
        return sum(self.sizes.values())

    def allocated(self) -> int:
        return sum(b.size for b in self.blocks if not b.free)

    def address(self, block: Block) -> int:
        return self.bases[block.segment] + block.offset

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        size = (num_bytes + 511) // 512 * 512
        small = size <= MIB
        best = self._best_fit(size, small, stream)
        block = best or self._new_segment(size, small, stream)
        block.free = False
        rest = block.size - size
        unsplittable = self.max_split is not None and size >= self.max_split
        if (rest >= 512) if small else (rest > MIB and not unsplittable):
            block.size = size
            self.blocks.append(Block(block.segment, block.offset + size, rest, small, True, stream))
        self.log.append(("alloc", self.address(block), num_bytes, stream))
        return block

    def free(self, block: Block, num_bytes: int) -> None:
        self.log.append(("free_completed", self.address(block), num_bytes, block.stream))
        block.free = True
        for one in [b for b in self.blocks if b.free and b.segment == block.segment]:
            if one.offset + one.size == block.offset:
                block.offset, block.size = one.offset, one.size + block.size
                self.blocks.remove(one)
            elif block.offset + block.size == one.offset:
                block.size += one.size
                self.blocks.remove(one)

    def _best_fit(self, size: int, small: bool, stream: int) -> Block | None:
        fitting = [b for b in self._cached(small, stream) if b.size >= size]
        if not fitting:
            return None
        best = min(fitting, key=lambda b: (b.size, self.address(b)))
        if self.max_split is not None:
            if size < self.max_split <= best.size:
                return None
            if size >= self.max_split and best.size >= size + self.max_rounding:
                return None
        return best

    def _cached(self, small: bool, stream: int) -> list[Block]:
        return [b for b in self.blocks if b.free and (b.small, b.stream) == (small, stream)]

    def _new_segment(self, size: int, small: bool, stream: int) -> Block:
        if small:
            total = 2 * MIB
        elif size < 10 * MIB:
            total = 20 * MIB
        else:
            total = (size + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
        if not self._has(total) and not (
            self._release_oversize(size, small, stream) and self._has(total)
        ):
            for block in [b for b in self.blocks if self._is_whole(b)]:
                self._release(block)
            self.retries += 1
        if not self._has(total):
            raise MemoryError
        # Segments touch, as a driver's may: blocks of two segments must not merge all the same.
        past = sum(taken for action, _, taken, _ in self.log if action == "segment_alloc")
        base = TOP + past
        self.bases.append(base)
        segment = len(self.bases) - 1
        self.sizes[segment] = total
        block = Block(segment, 0, total, small, True, stream)
        self.blocks.append(block)
        self.log.append(("segment_alloc", base, total, stream))
        return block

    def _has(self, total: int) -> bool:
        return self.capacity is None or self.reserved() + total <= self.capacity

    def _is_whole(self, block: Block) -> bool:
        return block.free and block.size == self.sizes[block.segment]

    def _release_oversize(self, size: int, small: bool, stream: int) -> bool:
        if self.max_split is None:
            return False
        wanted = max(size, self.max_split)
        free = self._cached(small, stream)
        free.sort(key=lambda b: (b.size, self.address(b)))
        for block in free:
            if block.size >= wanted:
                self._release(block)
                return True
        released = 0
        for block in reversed(free):
            if released >= wanted or block.size < self.max_split:
                break
            released += block.size
            self._release(block)
        return released >= wanted

    def _release(self, block: Block) -> None:
        self.log.append(("segment_free", self.address(block), block.size, block.stream))
        self.blocks.remove(block)
        del self.sizes[block.segment]
