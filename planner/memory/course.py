"""The course of a recorded step: its requests in order, each of a size affine in the batch.

What a batch does not change (order, lifetimes, categories, names) is prepared once. Swin-L's 16,000
requests are of some 80 sizes: a batch costs the evaluation of those, a running sum, and the replay
of the allocator's two pools. Everything read here equals what `read_ledger` reads of the ledger at
that batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

from planner.ledger import Allocated, Category, Computed, Event, Ledger, Marked
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.caching_allocator import UNIT_BITS, CachingAllocator
from planner.memory.pool_replay import PoolRules, Recurrence, Stretch, replay_pool
from planner.memory.profile import (
    NUM_LARGEST,
    TRANSIENT,
    Instant,
    Profile,
    Reading,
    device_requests,
    find_alive,
    last_request,
    phase_at,
    profile,
)
from planner.memory.replay import plain_pools, repeat_step, replay_steady

Slopes = Mapping[int, tuple[int, int]]  # event -> bytes and FLOPs per image, where there are any
Operation = tuple[str, Computed]


class Course:
    """`events` are those at `batch_size`, and `slopes` what an image more adds to them."""

    def __init__(self, events: Sequence[Event], slopes: Slopes, batch_size: int) -> None:
        self.batch_size = batch_size
        self._slopes = slopes
        self._sizes: dict[tuple[int, int], int] = {(0, 0): 0}  # (bytes, per image) -> its number
        numbered = [
            event._replace(num_bytes=self._number(event.num_bytes, slopes.get(index, (0, 0))[0]))
            if isinstance(event, Allocated)
            else event
            for index, event in enumerate(events)
        ]
        self._workspace = self._number(-1, 0)  # its size is only known when it is read
        # As a ledger whose bytes are the numbers of sizes: lifetimes and order are read off it.
        self._ledger = Ledger(tuple(numbered), batch_size, 0)
        live = profile(self._ledger)
        asked = device_requests(self._ledger, live.steady_from, self._workspace)
        self._steady_event = live.steady_from
        self._start = asked.steady_from
        self._stop = len(asked.entries)
        self._events_of = asked.events
        # Raises ValueError for a step that does not repeat.
        self._entries = repeat_step(asked.entries, asked.steady_from)
        self._num_workspaces = asked.entries[: self._start].count(self._workspace)
        self._marks = [
            (event.phase, sum(1 for of in asked.events[self._start :] if of < index))
            for index, event in enumerate(events)
            if isinstance(event, Marked) and index > live.steady_from
        ]
        count = len(self._sizes)
        self._changes = _Getter([n if n >= 0 else count + self._entries[~n] for n in self._entries])
        self._pools: dict[bytes, list[_PoolCourse]] = {}
        self._instants: dict[int, _InstantCourse] = {}

    def read(
        self,
        batch_size: int,
        workspace_bytes: int,
        config: AllocatorConfig | None,
        allowed_bytes: int | None = None,
    ) -> Reading:
        """As `read_ledger` of the ledger at `batch_size`, which is 2 or more."""
        sizes = self._sizes_at(batch_size, workspace_bytes)
        units = [(num_bytes + 511) >> UNIT_BITS for num_bytes in sizes]
        changes = list(self._changes([*units, *(-n for n in units)]))
        live = self._profile(changes, units[self._workspace])
        course = self._instants.get(live.peak_index)
        if course is None:
            course = _InstantCourse.at(self._ledger.events, live.peak_index)
            self._instants[live.peak_index] = course
        peak = course.read(sizes, units)
        if not CachingAllocator(config, allowed_bytes=allowed_bytes).is_plain:
            requests = [sizes[n] if n >= 0 else n for n in self._entries]
            played = replay_steady(requests, config, self._start, allowed_bytes)
            return Reading(live, peak, played.peak_allocated_bytes, played.peak_reserved_bytes)
        reserved = self._play(changes, units, config or AllocatorConfig())
        held = sum(changes[: self._start])
        allocated = max(accumulate(changes[self._start :], initial=held))
        return Reading(live, peak, allocated << UNIT_BITS, reserved << UNIT_BITS)

    def operations(self, batch_size: int) -> list[Operation]:
        """The steady step's operations as `Ledger.operations` gives them, but those alike are one
        object, without the name and path of each."""
        more = batch_size - self.batch_size
        distinct = [
            computed._replace(
                num_bytes=computed.num_bytes + more * num_bytes, flops=computed.flops + more * flops
            )
            for computed, (num_bytes, flops) in self._operations.distinct
        ]
        return [(phase, distinct[number]) for phase, number in self._operations.steps]

    def _number(self, num_bytes: int, per_image: int) -> int:
        return self._sizes.setdefault((num_bytes, per_image), len(self._sizes))

    def _sizes_at(self, batch_size: int, workspace_bytes: int) -> list[int]:
        more = batch_size - self.batch_size
        sizes = [num_bytes + more * per_image for num_bytes, per_image in self._sizes]
        sizes[self._workspace] = workspace_bytes
        return sizes

    def _profile(self, changes: Sequence[int], workspace_units: int) -> Profile:
        before = sum(changes[: self._start]) - self._num_workspaces * workspace_units
        running = list(accumulate(changes[self._start : self._stop], initial=before))
        peak = max(running)
        at = running.index(peak)
        return Profile(
            before_step=before << UNIT_BITS,
            ends=tuple((phase, running[place] << UNIT_BITS) for phase, place in self._marks),
            peak_bytes=peak << UNIT_BITS,
            peak_index=self._events_of[self._start + at - 1] if at else self._steady_event,
            steady_from=self._steady_event,
        )

    def _play(self, changes: list[int], units: list[int], config: AllocatorConfig) -> int:
        """Plays each pool; adds to `changes` what blocks have more than was asked. Returns the
        units reserved."""
        rules = plain_pools(config)
        # Which pool serves each size decides what each pool sees: few ways over all batches.
        kinds = bytes(0 if not n else 1 if n <= rules[0][2] else 2 for n in units)
        pools = self._pools.get(kinds)
        if pools is None:
            steady = range(self._start, self._stop)
            pools = [_PoolCourse.of(self._entries, kinds, kind, steady) for kind in (1, 2)]
            self._pools[kinds] = pools
        reserved = 0
        for pool, (rule, _, _) in zip(pools, rules, strict=True):
            reserved += pool.play(changes, units, rule)
        return reserved

    @cached_property
    def _operations(self) -> _Operations:
        found = _Operations()
        numbers: dict[tuple[Computed, tuple[int, int]], int] = {}
        pending: list[int] = []
        for index, event in enumerate(self._ledger.events):
            if isinstance(event, Computed):
                alike = event._replace(name="", path=""), self._slopes.get(index, (0, 0))
                pending.append(numbers.setdefault(alike, len(numbers)))
            elif isinstance(event, Marked):
                if event.step == 1 and event.phase != "validation":
                    found.steps.extend((event.phase, number) for number in pending)
                pending.clear()
        found.distinct.extend(numbers)
        return found


@dataclass
class _Operations:
    """`distinct` are (operation, bytes and FLOPs per image); `steps` (phase, which of them)."""

    distinct: list[tuple[Computed, tuple[int, int]]] = field(default_factory=list)
    steps: list[tuple[str, int]] = field(default_factory=list)


# Where in its repetition the steady step is looked at for a recurrence, in eighths: it is found in
# the first half or not at all.
_LOOKED_AT = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class _PoolCourse:
    """What one pool sees, in stretches: each picks from sizes in units followed by `releases`.
    `born` and `dead` are the entries of each allocation and of its release (-1 where there is
    none)."""

    stretches: list[tuple[_Getter, Recurrence | None]]
    releases: list[int]
    born: list[int]
    dead: list[int]

    @classmethod
    def of(cls, entries: Sequence[int], kinds: bytes, kind: int, steady: range) -> _PoolCourse:
        """The pool of the sizes of `kind`; `steady` are the entries that are then repeated."""
        looked_at = [len(steady) * eighths // 8 for eighths in _LOOKED_AT] if kind == 1 else []
        earlier = {steady.start + offset: offset for offset in looked_at}
        later = {steady.stop + offset: offset for offset in looked_at}
        alive_earlier: dict[int, list[int]] = {}
        stretches: list[tuple[list[int], Recurrence | None]] = [([], None)]
        ordinals: dict[int, int] = {}
        alive: dict[int, None] = {}  # in order of birth
        dead: list[int] = []
        for entry, number in enumerate(entries):
            if entry in earlier:
                alive_earlier[earlier[entry]] = [len(dead), *alive]
            elif entry in later:
                since, *then = alive_earlier[later[entry]]
                stretches.append(([], _recurrence(since, then, list(alive))))
            if kinds[number if number >= 0 else entries[~number]] != kind:
                continue
            if number >= 0:
                ordinals[entry] = len(ordinals)
                alive[ordinals[entry]] = None
                stretches[-1][0].append(number)
                dead.append(-1)
            else:
                dead[ordinals[~number]] = entry
                del alive[ordinals[~number]]
                stretches[-1][0].append(len(kinds) + ordinals[~number])
        return cls(
            [(_Getter(picked), recurrence) for picked, recurrence in stretches],
            [~n for n in range(len(dead))],
            list(ordinals),
            dead,
        )

    def play(self, changes: list[int], units: list[int], rules: PoolRules) -> int:
        """Units reserved; `changes` of entries grow by what their blocks have too much."""
        items = units + self.releases
        stretches: Iterable[Stretch] = ((getter(items), r) for getter, r in self.stretches)
        played = replay_pool(stretches, rules)
        born, dead = self.born, self.dead
        for ordinal, rest in played.slack:
            changes[born[ordinal]] += rest
            if dead[ordinal] >= 0:
                changes[dead[ordinal]] -= rest
        return played.reserved_units


def _recurrence(since: int, then: list[int], now: list[int]) -> Recurrence | None:
    """Of the blocks alive at both places, oldest first; None where there are others."""
    if len(then) != len(now):
        return None
    differing = [(a, b) for a, b in zip(then, now, strict=True) if a != b]
    return Recurrence(since, _Getter([a for a, _ in differing]), _Getter([b for _, b in differing]))


@dataclass(frozen=True)
class _InstantCourse:
    """An instant but for its bytes. Sizes are numbers: `categories` count them, and `transient` are
    (age, number, path, label) of those storages of each size that may be among the largest."""

    event_index: int
    phase: str
    micro_batch: int
    label: str
    path: str
    categories: dict[Category, Counter[int]]
    transient: list[tuple[int, int, str, str]]

    @classmethod
    def at(cls, events: Sequence[Event], index: int) -> _InstantCourse:
        categories: dict[Category, Counter[int]] = {}
        transient: list[tuple[int, int, str, str]] = []
        seen: Counter[int] = Counter()
        for age, (event, category) in enumerate(find_alive(events, index)):
            number = event.num_bytes
            categories.setdefault(category, Counter())[number] += 1
            if category in TRANSIENT and seen[number] < NUM_LARGEST:
                seen[number] += 1
                transient.append((age, number, event.path, event.label))
        phase, micro_batch = phase_at(events, index)
        label, path = last_request(events, index)
        return cls(index, phase, micro_batch, label, path, categories, transient)

    def read(self, sizes: Sequence[int], units: Sequence[int]) -> Instant:
        by_category = {
            category: sum(units[number] * count for number, count in counts.items()) << UNIT_BITS
            for category, counts in self.categories.items()
        }
        largest = sorted(
            (-sizes[number], age, path, label) for age, number, path, label in self.transient
        )
        return Instant(
            self.event_index,
            self.phase,
            self.micro_batch,
            self.label,
            self.path,
            sum(by_category.values()),
            by_category,
            tuple((path, label, -size) for size, _, path, label in largest[:NUM_LARGEST]),
        )


class _Getter:
    """Picks items of a list by `indices`: `itemgetter`, which returns no tuple for one or none."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._few = indices if len(indices) < 2 else None
        self._many = itemgetter(*indices) if len(indices) > 1 else None

    def __call__(self, items: Sequence[int]) -> tuple[int, ...]:
        if self._many is None:
            return tuple(items[i] for i in self._few or ())
        found: tuple[int, ...] = self._many(items)
        return found
