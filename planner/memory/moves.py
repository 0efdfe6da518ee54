"""What the caching allocator does in a predicted training, move by move: blocks and segments.

Played is what an estimate plays: building the model, the first step, and the steady step twice, as
reserved memory can still rise the second time (`planner.memory.replay.replay_steady`). Here every
move is kept with its address, which an estimate has no use for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from planner.ledger.ledger import Ledger
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.caching_allocator import (
    SMALL,
    SMALL_SEGMENT,
    UNIT_BITS,
    Block,
    CachingAllocator,
    Pool,
)
from planner.memory.profile import Walk, steady_requests
from planner.memory.replay import handed_on, play_steady, repeated

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
    player, is_twice = play_steady(
        requests, steady_from, config, allowed_bytes, walked.streams, walked.emptied, _Recording
    )
    assert isinstance(player.allocator, _Recording)
    end, period = len(requests), len(requests) - steady_from
    streams = walked.streams
    played = list(requests)
    if is_twice:
        left = handed_on(requests, steady_from, streams) or {}
        played += repeated(requests, steady_from, left, 1)[0]
    moves: list[Move] = []
    held: dict[int, Held] = {}
    segments = iter(player.allocator.segments)
    segment = next(segments, None)
    for entry, (request, (address, units)) in enumerate(zip(played, player.blocks, strict=True)):
        again = entry >= end
        cause = entry - period if again else entry
        while segment is not None and segment.entry == entry:
            moves.append(segment._replace(entry=cause, cause=cause, again=again))
            segment = next(segments, None)
        if not units:
            continue
        block = address << UNIT_BITS, units << UNIT_BITS
        asked = entry if request > 0 else ~request
        served = asked - period if asked >= end else asked
        moves.append(
            Move("alloc" if request > 0 else "free", *block, streams[served], served, cause, again)
        )
        if request > 0:
            held[address] = Held(units, served)
        else:
            del held[address]
    expandable = config is not None and config.expandable_segments
    return Moves(walked, requests, moves, _runs(player.allocator, held, streams), expandable)


def _runs(allocator: _Recording, held: dict[int, Held], streams: Sequence[int]) -> list[Run]:
    """What lies side by side: segments are apart, and a segment has no gap. `held` has units."""
    by_pool: dict[tuple[int, bool], dict[int, tuple[int, int | None]]] = {}
    for address, (units, entry) in held.items():
        by_pool.setdefault((streams[entry], units <= SMALL), {})[address] = units, entry
    for key, pool in allocator.pools():
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
    """The allocator that keeps what it takes from the driver and gives back: as moves whose `entry`
    is the number of the entry that is played. Segments begin at whole 2 MiB, as the driver's do."""

    def __init__(
        self,
        played: Sequence[Block],
        config: AllocatorConfig | None,
        allowed_bytes: int | None,
        num_streams: int,
    ) -> None:
        super().__init__(config, allowed_bytes=allowed_bytes, num_streams=num_streams)
        self.segments: list[Move] = []
        self._played = played
        self._stream_of = {id(pool): key[0] for key, pool in self.pools()}

    def pools(self) -> list[tuple[tuple[int, bool], Pool]]:
        """((stream, whether it is the small one), pool)."""
        sides = ((True, self.small), (False, self.large))
        return [((n, small), pool) for small, pools in sides for n, pool in enumerate(pools)]

    def _note_segment(self, action: Action, pool: Pool, address: int, units: int) -> None:
        block = address << UNIT_BITS, units << UNIT_BITS
        stream, entry = self._stream_of[id(pool)], len(self._played)
        self.segments.append(Move(action, *block, stream, entry, entry, again=False))

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
