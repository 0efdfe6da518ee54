"""What the caching allocator does in a predicted training, move by move: blocks and segments.

Played is what an estimate plays: building the model, the first step, and the steady step twice, as
reserved memory can still rise the second time (`planner.memory.replay.replay_steady`). Here every
move is kept with its address, which an estimate has no use for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from planner.ledger import Ledger
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.caching_allocator import (
    SMALL,
    SMALL_SEGMENT,
    UNIT_BITS,
    Block,
    CachingAllocator,
    OutOfMemoryError,
    Pool,
)
from planner.memory.profile import Walk, steady_requests
from planner.memory.replay import handed_on

Action = Literal[
    "alloc", "free", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
]  # fmt: skip


class Move(NamedTuple):
    """A block given or taken back, or a segment taken from the driver or returned to it.

    `entry` is the request behind it (of a release, the one that it releases), `cause` the entry
    that was played, `again` whether in the steady step's second turn. `address` and `num_bytes` are
    of the block or the segment.
    """

    action: Action
    address: int
    num_bytes: int
    stream: int
    entry: int
    cause: int
    again: bool


class Held(NamedTuple):
    """A block in use at the end: its size, and the request that it serves."""

    num_bytes: int
    entry: int


class Run(NamedTuple):
    """Memory of the driver without a gap, of one pool of a stream: a segment, or the mapped pages
    of an expandable one. Its `free` blocks and `held` ones by address fill it."""

    address: int
    num_bytes: int
    stream: int
    is_small: bool
    held: dict[int, Held]
    free: dict[int, int]


@dataclass(frozen=True)
class Moves:
    """All moves, and what the allocator holds after them, in order of address. `requests` are in
    bytes, as the walk has them, with a device's workspaces."""

    walked: Walk
    requests: list[int]
    moves: list[Move]
    runs: list[Run]
    is_expandable: bool


def allocator_moves(
    ledger: Ledger,
    workspace_bytes: int,
    config: AllocatorConfig | None = None,
    allowed_bytes: int | None = None,
) -> Moves:
    """Every move of the allocator in a predicted training. A limit counts as in `replay_steady`:
    only where garbage is collected, and not where the steps cannot live within it."""
    walked, requests, steady_from = steady_requests(ledger, workspace_bytes)
    collects = config is not None and bool(config.garbage_collection_threshold)
    for limit in (allowed_bytes if collects else None, None):
        player = _Player(requests, walked.streams, config, limit)
        try:
            player.play(0)
            then = handed_on(requests, steady_from, walked.streams)
            if then is not None:
                player.play(steady_from, then)
            break
        except OutOfMemoryError:
            continue
    expandable = config is not None and config.expandable_segments
    return Moves(walked, requests, player.allocator.moves, player.runs(), expandable)


class _Player:
    """Plays requests, and keeps which block serves which of them."""

    def __init__(
        self,
        requests: Sequence[int],
        streams: Sequence[int],
        config: AllocatorConfig | None,
        allowed_bytes: int | None,
    ) -> None:
        self.requests, self.streams = requests, streams
        num_streams = max(streams, default=0) + 1
        self.allocator = _Recording(config, allowed_bytes=allowed_bytes, num_streams=num_streams)
        self.live: dict[int, Block] = {}  # request -> block, of the turn that asked last
        self.before: dict[int, Block] = {}  # the same, from before the steady step's second turn

    def play(self, start: int, again: dict[int, int] | None = None) -> None:
        """The requests from `start` on; `again` is what the step before left for which of them."""
        if again is not None:
            self.before, self.live = self.live, {}
        allocator = self.allocator
        for entry in range(start, len(self.requests)):
            request, stream = self.requests[entry], self.streams[entry]
            allocator.begin(entry, again is not None)
            if request > 0:
                block = self.live[entry] = allocator.allocate(request, stream)
                allocator.note("alloc", block, stream, entry)
            elif request < 0 and self.requests[~request] > 0:
                block = self._taken(~request, again)
                allocator.note("free", block, stream, ~request)
                allocator.free(block, stream)

    def _taken(self, entry: int, again: dict[int, int] | None) -> Block:
        if entry in self.live:
            return self.live.pop(entry)
        assert again is not None, "a release follows its request"
        return self.before.pop(again.get(entry, entry))

    def runs(self) -> list[Run]:
        """What lies side by side: segments are apart, and a segment has no gap."""
        held = [*self.before.items(), *self.live.items()]
        by_pool: dict[tuple[int, bool], dict[int, tuple[int, int | None]]] = {}
        for entry, (address, units) in held:
            key = self.streams[entry], self.allocator.is_small(units)
            by_pool.setdefault(key, {})[address] = units, entry
        for key, pool in self.allocator.pools():
            blocks = by_pool.setdefault(key, {})
            blocks |= {address: (units, None) for address, units in pool.starts.items()}
        return sorted(
            run for (stream, small), blocks in by_pool.items()
            for run in _side_by_side(blocks, stream, small)
        )  # fmt: skip


def _side_by_side(
    blocks: dict[int, tuple[int, int | None]], stream: int, is_small: bool
) -> list[Run]:
    found: list[Run] = []
    end = -1
    for address in sorted(blocks):
        units, entry = blocks[address]
        if address != end:
            found.append(Run(address << UNIT_BITS, 0, stream, is_small, {}, {}))
        run = found[-1]
        if entry is None:
            run.free[address << UNIT_BITS] = units << UNIT_BITS
        else:
            run.held[address << UNIT_BITS] = Held(units << UNIT_BITS, entry)
        end = address + units
        found[-1] = run._replace(num_bytes=(end << UNIT_BITS) - run.address)
    return found


class _Recording(CachingAllocator):
    """The allocator that keeps its moves. Segments begin at whole 2 MiB, as the driver's do."""

    def __init__(
        self, config: AllocatorConfig | None, *, allowed_bytes: int | None, num_streams: int
    ) -> None:
        super().__init__(config, allowed_bytes=allowed_bytes, num_streams=num_streams)
        self.moves: list[Move] = []
        self._cause, self._again = 0, False
        self._stream_of = {id(pool): key[0] for key, pool in self.pools()}

    def begin(self, entry: int, again: bool) -> None:
        """From here on moves are made for `entry`."""
        self._cause, self._again = entry, again

    def note(self, action: Action, block: Block, stream: int, entry: int) -> None:
        address, units = block
        self.moves.append(
            Move(
                action, address << UNIT_BITS, units << UNIT_BITS, stream, entry, self._cause,
                self._again,
            )
        )  # fmt: skip

    def pools(self) -> list[tuple[tuple[int, bool], Pool]]:
        """((stream, whether it is the small one), pool)."""
        sides = ((True, self.small), (False, self.large))
        return [((n, small), pool) for small, pools in sides for n, pool in enumerate(pools)]

    def is_small(self, units: int) -> bool:
        return units <= SMALL

    def _note_segment(self, action: Action, pool: Pool, address: int, units: int) -> None:
        self.note(action, (address, units), self._stream_of[id(pool)], self._cause)

    def _new_address(self, units: int) -> int:
        self._next_address = -(-self._next_address // SMALL_SEGMENT) * SMALL_SEGMENT
        return super()._new_address(units)

    def _grow(self, pool: Pool, units: int) -> Block | None:
        block = super()._grow(pool, units)
        if block is not None and block[0] in pool.segments:
            self._note_segment("segment_alloc", pool, *block)
        return block

    def _release(self, pool: Pool, address: int, size: int) -> None:
        super()._release(pool, address, size)
        self._note_segment("segment_free", pool, address, size)

    def _map(self, pool: Pool, address: int, units: int) -> Block:
        self._note_segment("segment_map", pool, address, -(-units // pool.page) * pool.page)
        return super()._map(pool, address, units)

    def _unmap(self, pool: Pool, start: int, size: int) -> None:
        reserved = pool.reserved_units
        super()._unmap(pool, start, size)
        units = reserved - pool.reserved_units
        if units:
            first = -(-start // pool.page) * pool.page
            self._note_segment("segment_unmap", pool, first, units)
