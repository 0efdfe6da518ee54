"""One pool of the caching allocator replayed by itself, under its default options: the short way.

While memory does not run out the small and the large pool know nothing of each other: each sees its
own requests in order, and gets a segment of its own where nothing fits. A replay is most of an
estimate's time, so the rules of `caching_allocator` (best fit, split, merge) are written out here
in one loop, without calls. A test holds it equal to them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_NONE = 1 << 120  # above every size and every address


@dataclass(frozen=True)
class PoolRules:
    """Sizes in units of 512 B. A block is split where at least `min_rest` would remain. A request
    from `own_segment_from` on gets a segment of its own, rounded up to `rounding`; a smaller one
    gets `segment`."""

    min_rest: int
    segment: int
    own_segment_from: int
    rounding: int

    def segment_for(self, units: int) -> int:
        if units < self.own_segment_from:
            return self.segment
        return -(-units // self.rounding) * self.rounding


@dataclass(frozen=True)
class PoolReplay:
    """`grown` are (allocation, units of the segment taken for it), `slack` (allocation, units its
    block is larger than asked); allocations are counted from 0."""

    grown: list[tuple[int, int]]
    slack: list[tuple[int, int]]

    @property
    def reserved_units(self) -> int:
        return sum(units for _, units in self.grown)


@dataclass(frozen=True)
class Recurrence:
    """A place in a repeated step and the same place one step earlier, when allocation `since` was
    next: `earlier` and `now` pick the blocks then and now alive that correspond.

    Where those lie at the same addresses and no segment came in between, the step goes on as the
    earlier one did, since which blocks are free follows from which are not. Only for a pool whose
    blocks are as large as their requests, the small one.
    """

    since: int
    earlier: Callable[[list[int]], object]
    now: Callable[[list[int]], object]

    def holds(self, addresses: list[int], grown: list[tuple[int, int]]) -> bool:
        """Whether all that follows was seen before."""
        if grown and grown[-1][0] >= self.since:
            return False
        return self.earlier(addresses) == self.now(addresses)


Stretch = tuple[Iterable[int], Recurrence | None]


def replay_pool(stretches: Iterable[Stretch], rules: PoolRules) -> PoolReplay:
    """Play each stretch's events, unless its recurrence shows that nothing new will come: n > 0
    asks for n units, ~k releases what allocation k got.

    The block freed or split last is held apart from the others (`hot`, `hot_end`, `hot_size`),
    since the next request often takes it or the next release joins it; it is put back among them
    when another takes its place. Addresses are mirrored, so that of equally large blocks the one to
    take, the lowest of the device's, is the last of an ascending list; an allocation gets the upper
    part of a block.
    """
    min_rest = rules.min_rest
    nothing = _NONE
    sizes = [nothing]  # of the free blocks, ascending
    by_size: dict[int, list[int]] = {}  # size -> ascending addresses
    starts: dict[int, int] = {}  # address of a free block -> its size
    ends: dict[int, int] = {}  # address just past it -> its address
    hot = hot_end = _NONE
    hot_size = 0
    floor = nothing  # no other block of this size or more is smaller than the hot one
    next_segment = 0
    addresses: list[int] = []
    lengths: list[int] = []
    grown: list[tuple[int, int]] = []
    slack: list[tuple[int, int]] = []
    for events, recurrence in stretches:
        if recurrence and recurrence.holds(addresses, grown):
            break
        for event in events:
            if event > 0:
                if floor <= event <= hot_size and hot_size - event >= min_rest:
                    hot_size -= event
                    hot_end -= event
                    addresses.append(hot_end)
                    lengths.append(event)
                    continue
                fit = bisect_left(sizes, event)
                size = sizes[fit]
                if event <= hot_size and (
                    hot_size < size or (hot_size == size and hot > by_size[size][-1])
                ):
                    rest = hot_size - event
                    if rest >= min_rest:
                        hot_size = rest
                        hot_end = hot + rest
                        floor = event
                        addresses.append(hot_end)
                        lengths.append(event)
                    else:
                        if rest:
                            slack.append((len(addresses), rest))
                        addresses.append(hot)
                        lengths.append(hot_size)
                        hot = hot_end = _NONE
                        hot_size = 0
                    continue
                if size == nothing:
                    size = rules.segment_for(event)
                    grown.append((len(addresses), size))
                    next_segment -= size + 1  # a gap: blocks of two segments are no neighbours
                    address = next_segment
                else:
                    listed = by_size[size]
                    address = listed.pop()
                    if not listed:
                        del by_size[size], sizes[fit]
                    del starts[address], ends[address + size]
                rest = size - event
                if rest >= min_rest:
                    if hot_size:
                        starts[hot] = hot_size
                        ends[hot_end] = hot
                        if hot_size in by_size:
                            insort(by_size[hot_size], hot)
                        else:
                            by_size[hot_size] = [hot]
                            insort(sizes, hot_size)
                    hot = address
                    hot_end = address + rest
                    hot_size = rest
                    floor = event
                    addresses.append(hot_end)
                    lengths.append(event)
                else:
                    if rest:
                        slack.append((len(addresses), rest))
                    addresses.append(address)
                    lengths.append(size)
                continue
            floor = nothing
            address = addresses[~event]
            size = lengths[~event]
            end = address + size
            if address == hot_end:
                hot_size += size
                hot_end = end
                if end in starts:
                    after = starts.pop(end)
                    hot_size += after
                    hot_end += after
                    del ends[hot_end]
                    listed = by_size[after]
                    if len(listed) == 1:
                        del by_size[after], sizes[bisect_left(sizes, after)]
                    else:
                        listed.remove(end)
                continue
            if end == hot:
                hot = address
                hot_size += size
                if address in ends:
                    hot = ends.pop(address)
                    before = starts.pop(hot)
                    hot_size += before
                    listed = by_size[before]
                    if len(listed) == 1:
                        del by_size[before], sizes[bisect_left(sizes, before)]
                    else:
                        listed.remove(hot)
                continue
            if hot_size:
                starts[hot] = hot_size
                ends[hot_end] = hot
                if hot_size in by_size:
                    insort(by_size[hot_size], hot)
                else:
                    by_size[hot_size] = [hot]
                    insort(sizes, hot_size)
            if end in starts:
                after = starts.pop(end)
                listed = by_size[after]
                if len(listed) == 1:
                    del by_size[after], sizes[bisect_left(sizes, after)]
                else:
                    listed.remove(end)
                size += after
                end += after
                del ends[end]
            if address in ends:
                address = ends.pop(address)
                before = starts.pop(address)
                listed = by_size[before]
                if len(listed) == 1:
                    del by_size[before], sizes[bisect_left(sizes, before)]
                else:
                    listed.remove(address)
                size += before
            hot = address
            hot_end = end
            hot_size = size
    return PoolReplay(grown, slack)
