"""What a ledger says of memory: one walk over its events, and what is read off it.

Live bytes count each request rounded to 512 B, as the caching allocator does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any

from planner.core.torch_version import torch_version
from planner.core.units import MIB
from planner.ledger.ledger import (
    CATEGORIES,
    Allocated,
    Category,
    Computed,
    Emptied,
    Event,
    EventsAt,
    Freed,
    Ledger,
    Marked,
    Scratch,
    Tagged,
)
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.caching_allocator import UNIT_BITS, rounded
from planner.memory.replay import Player, SteadyPeaks, replay_steady, replay_within

NUM_LARGEST = 8  # storages that an instant names
TRANSIENT: tuple[Category, ...] = ("temporaries", "activations")
NUM_KEPT = 8  # walks and profiles kept: one ledger is asked for every GPU of a list
# What cuBLASLt works in from torch 2.15 on, on every device (what torch 2.15's own code asks for).
LT_WORKSPACE_BYTES = MIB
# Matrix products that cuBLASLt does: those that add a bias (aten/src/ATen/native/cuda/Blas.cpp).
LT_PRODUCTS = frozenset(("aten.addmm", "aten._scaled_mm"))
NUM_ALIKE = 24  # kept, each of about 1 MiB: one step is asked for at many batches


@dataclass(frozen=True)
class Walk:
    """Events in one pass.

    `marks` are the ends of phases with their indices, and `sizes` the bytes of each storage, after
    the 0 bytes that stand for workspaces. Of each request `sources` says which of them is asked
    for, or given back (its complement), `released` the complement of the request that is given back
    (0: none), and `events` the index of the event behind it. Those at `workspaces` are of 0 bytes,
    to be set to a device's workspace: up to torch 2.14
    one is asked for at the first matrix product of forward, another at backward's first; from 2.15
    on one at each, and given back, and those at `lt_workspaces` are cuBLASLt's. `streams` are the
    numbers of the requests' streams and `stream_names` their names, that which computes first.
    Before those at `emptied`, of the first step, the allocator gives back what it has cached.
    `recorded_workspaces` are the places in `sizes` of those that torch was seen to ask for.
    """

    sizes: list[int]
    num_events: int
    marks: list[tuple[int, Marked]]
    sources: list[int]
    released: list[int]
    events: list[int]
    workspaces: list[int]
    lt_workspaces: list[int]
    streams: list[int]
    stream_names: tuple[str, ...]
    emptied: list[int]
    recorded_workspaces: list[int]

    @cached_property
    def alive(self) -> list[int]:
        """The bytes alive before the first request and after each, without workspaces; a size is
        rounded once."""
        changes = [-(-n >> UNIT_BITS) << UNIT_BITS for n in self.sizes]
        for source in self.recorded_workspaces:
            changes[source] = 0
        changes += [-n for n in reversed(changes)]  # of a release: its source is below 0
        return list(accumulate(map(changes.__getitem__, self.sources), initial=0))

    @cached_property
    def requests(self) -> list[int]:
        """What the allocator is asked, as `replay` takes it; workspaces are of 0 bytes."""
        sizes, pairs = self.sizes, zip(self.released, self.sources, strict=True)
        return [release or sizes[source] for release, source in pairs]

    @property
    def moves(self) -> list[int]:
        """The indices of the allocations and releases."""
        pairs = zip(self.sources, self.events, strict=True)
        return [index for source, index in pairs if source not in (0, ~0)]

    @cached_property
    def live(self) -> list[int]:
        """The bytes alive after each event."""
        return [self.alive[self.num_served(index)] for index in range(self.num_events)]

    def num_served(self, index: int) -> int:
        """How many requests were served after event `index`."""
        return bisect_right(self.events, index)

    @cached_property
    def steady(self) -> SteadyStep:
        """The last step recorded, from the mark that begins it."""
        last = max(mark.step for _, mark in self.marks)
        start = next(index for index, mark in self.marks if _begins(mark, last))
        begun = self.num_served(start)
        alive = self.alive[begun:]
        peak = alive.index(max(alive))
        ends = [(mark.phase, self.alive[self.num_served(i)]) for i, mark in self.marks if i > start]
        return SteadyStep(
            before_step=alive[0],
            ends=tuple(ends),
            peak_bytes=alive[peak],
            peak_index=self.events[begun + peak - 1] if peak else start,
            steady_from=start,
        )

    def requests_with(self, workspace_bytes: int) -> list[int]:
        """The requests, for a device whose matrix products take `workspace_bytes`."""
        requests = list(self.requests)
        for entry in self.workspaces:
            requests[entry] = workspace_bytes
        for entry in self.lt_workspaces:
            requests[entry] = LT_WORKSPACE_BYTES
        return requests


@dataclass(frozen=True)
class Instant:
    """What is alive at one event: bytes by category, and the largest storages.

    `phase` and `micro_batch` (counted from 1) say when; `label` and `path` name the request that
    was served last.
    """

    event_index: int
    phase: str
    micro_batch: int
    label: str
    path: str
    live_bytes: int
    by_category: dict[Category, int]
    largest: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class SteadyStep:
    """Live bytes of the steady step, the last one recorded.

    `ends` are (phase, live bytes at its end) in order; `before_step` is alive as it begins;
    `peak_index` the event at which the most was alive, `steady_from` the mark it begins with.
    """

    before_step: int
    ends: tuple[tuple[str, int], ...]
    peak_bytes: int
    peak_index: int
    steady_from: int

    @property
    def saved_bytes(self) -> int:
        """Held between the first forward's end and its backward: growth since the step began."""
        return self.ends[0][1] - self.before_step


@dataclass(frozen=True)
class MemoryProfile:
    """A ledger read for a device: live bytes over the steady step, its peak instant, and the
    allocator's peaks in bytes. `reserved_by_stream` says by name how the streams share what is
    reserved: no memory of one serves another."""

    live: SteadyStep
    peak: Instant
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    reserved_by_stream: dict[str, int]
    num_alloc_retries: int = 0
    retries_each_step: int = 0
    workspace_bytes: int = 0  # of those that are among the ledger's requests


def profile_memory(
    ledger: Ledger, workspace_bytes: int, config: AllocatorConfig | None
) -> MemoryProfile:
    """What a device makes of a ledger: the steady step's live bytes and the allocator's peaks."""
    return _profile_memory(ledger, workspace_bytes, config, has_kept_workspaces())


@lru_cache(maxsize=NUM_KEPT)
def _profile_memory(
    ledger: Ledger, workspace_bytes: int, config: AllocatorConfig | None, _keeps: bool
) -> MemoryProfile:
    walked, requests, steady_from = steady_requests(ledger, workspace_bytes)
    peaks = replay_steady(requests, steady_from, config, walked.streams, walked.emptied)
    return _profile_of(ledger, walked, peaks, _hole_bytes(ledger, config))


def profile_within(
    ledger: Ledger, workspace_bytes: int, config: AllocatorConfig | None, allowed_bytes: int
) -> MemoryProfile | None:
    """The same where the driver has `allowed_bytes` and no more; None where memory runs out."""
    holes = _hole_bytes(ledger, config)
    if steady_step(ledger).peak_bytes > allowed_bytes - holes:
        return None
    walked, requests, steady_from = steady_requests(ledger, workspace_bytes)
    peaks = replay_within(
        requests, steady_from, config, allowed_bytes - holes, walked.streams, walked.emptied
    )
    return None if peaks is None else _profile_of(ledger, walked, peaks, holes)


def _hole_bytes(ledger: Ledger, config: AllocatorConfig | None) -> int:
    """What a pool of CUDA graphs has reserved and none of its blocks ever filled at once: no other
    request gets it."""
    pool = Player(config, None, ())
    pool.play(ledger.pool_requests, 0)
    return (pool.peak_reserved - pool.peak_allocated) << UNIT_BITS


def _profile_of(ledger: Ledger, walked: Walk, peaks: SteadyPeaks, holes: int) -> MemoryProfile:
    live = steady_step(ledger)
    computing, *others = peaks.reserved_by_stream
    return MemoryProfile(
        live,
        instant(ledger, live.peak_index),
        peaks.allocated_bytes,
        peaks.reserved_bytes + holes,
        dict(zip(walked.stream_names, (computing + holes, *others), strict=True)),
        peaks.num_alloc_retries,
        peaks.retries_each_step,
        sum(rounded(walked.sizes[source]) for source in walked.recorded_workspaces),
    )


def walk(events: Iterable[Event]) -> Walk:
    """One pass over the events of a ledger, or of any part that releases only its own storages."""
    return _walk(events, has_kept_workspaces())


def walk_ledger(ledger: Ledger) -> Walk:
    """The walk over a ledger, kept: several readers ask for it."""
    return _walk_ledger(ledger, has_kept_workspaces())


@lru_cache(maxsize=NUM_KEPT)
def _walk_ledger(ledger: Ledger, keeps: bool) -> Walk:
    if not isinstance(ledger.events, EventsAt):
        return _walk_like(ledger, keeps)
    return replace(_walk_like(ledger.events.line.at, keeps), sizes=[0, *ledger.events.sizes])


def has_kept_workspaces() -> bool:
    """Whether cuBLAS's workspaces are asked for once and kept: up to torch 2.14."""
    return torch_version() < (2, 15)


@lru_cache(maxsize=NUM_ALIKE)
def _walk_like(ledger: Ledger, keeps: bool) -> Walk:
    """The walk of all ledgers that differ from this one only in their sizes, but for these."""
    return _walk(ledger.events, keeps)


def _walk(events: Iterable[Any], keeps: bool) -> Walk:
    """`keeps`: whether workspaces are asked for once and kept."""
    sizes, streams = [0], [0]  # by place: of workspaces, then of each storage
    places: dict[int, int] = {}  # of the storages that are alive
    requests: list[tuple[int, int]] = []  # (place, or its complement, the event behind it)
    workspaces, lt_workspaces, emptied, recorded = (list[int]() for _ in range(4))
    marks: list[tuple[int, Marked]] = []
    stream_numbers = {"": 0}
    is_first_step = wants_workspace = True  # of the first step no more than forward and backward
    index = -1
    for index, event in enumerate(events):
        kind = type(event)
        if kind is Allocated or kind is Scratch:
            place = places[event.storage] = len(sizes)
            requests.append((place, index))
            sizes.append(event.num_bytes)
            streams.append(stream_numbers.setdefault(event.stream, len(stream_numbers)))
        elif kind is Freed:
            requests.append((~places.pop(event.storage), index))
        elif kind is Computed:
            if event.kind == "matmul" and not keeps:
                is_lt = event.name in LT_PRODUCTS
                (lt_workspaces if is_lt else workspaces).append(len(requests))
                requests += [(0, index), (~0, index)]
            elif event.kind == "matmul" and wants_workspace:
                workspaces.append(len(requests))
                requests.append((0, index))
                wants_workspace = False
        elif kind is Tagged:
            if event.category == "workspace":
                recorded.append(places[event.storage])
        elif kind is Emptied:
            if is_first_step:
                emptied.append(len(requests))
        elif kind is Marked:
            marks.append((index, event))
            is_first_step = is_first_step and event.phase != "backward"
            wants_workspace = is_first_step  # forward's and backward's threads have one each
    sources, origins = [source for source, _ in requests], [origin for _, origin in requests]
    asked_at = [-1, *(entry for entry, source in enumerate(sources) if source > 0)]  # by place
    released = [  # a workspace is given back right behind its request
        0 if source >= 0 else ~(entry - 1) if source == ~0 else ~asked_at[~source]
        for entry, source in enumerate(sources)
    ]
    of_requests = [streams[max(source, ~source)] for source in sources]
    return Walk(
        sizes, index + 1, marks, sources, released, origins, workspaces, lt_workspaces,
        of_requests, tuple(stream_numbers), emptied, recorded,
    )  # fmt: skip


def steady_step(ledger: Ledger) -> SteadyStep:
    """The last step recorded, from the mark that begins it."""
    return walk_ledger(ledger).steady


def growth_within(ledger: Ledger, phase: str) -> int:
    """How far live bytes rise, within `phase` of the last step that has it, over those alive as it
    begins: what the phase needs for itself, and gives back or keeps."""
    walked = walk_ledger(ledger)
    growth, before = 0, 0
    for (_, start), (mark, end) in pairwise([(None, -1), *((m, i) for i, m in walked.marks)]):
        if mark is not None and mark.phase == phase:
            growth = max(before, *walked.live[start + 1 : end + 1]) - before
        before = walked.live[end]
    return growth


def _begins(mark: Marked, step: int) -> bool:
    """Whether `mark` is where optimizer step `step` begins."""
    if step == 0:
        return mark.phase == "build"
    return mark.phase == "zero_grad" and mark.step == step - 1


def steady_requests(ledger: Ledger, workspace_bytes: int) -> tuple[Walk, list[int], int]:
    """What a ledger asks of the allocator: its walk, the requests in bytes with a device's
    workspaces, and the entry from which they are of the steady step."""
    walked = walk_ledger(ledger)
    steady_from = bisect_left(walked.events, steady_step(ledger).steady_from)
    return walked, walked.requests_with(workspace_bytes), steady_from


def instant(ledger: Ledger, event_index: int) -> Instant:
    """What is alive right after event `event_index`."""
    alive = alive_at(ledger, event_index)
    by_category: dict[Category, int] = {}
    for num_bytes, category, _, _ in alive:
        if category != "workspace":
            by_category[category] = by_category.get(category, 0) + rounded(num_bytes)
    transient = [(path, label, n) for n, category, path, label in alive if category in TRANSIENT]
    transient.sort(key=lambda each: -each[2])
    when = _alive_at(ledger.like or ledger, event_index, has_kept_workspaces())[1]
    largest = tuple(transient[:NUM_LARGEST])
    return Instant(event_index, *when, sum(by_category.values()), by_category, largest)


def alive_at(ledger: Ledger, event_index: int) -> list[tuple[int, Category, str, str]]:
    """(bytes, category, path, label) of each storage that is alive right after an event, oldest
    first. Tags right behind it say what was just allocated."""
    sizes = walk_ledger(ledger).sizes
    found, _ = _alive_at(ledger.like or ledger, event_index, has_kept_workspaces())
    return [(sizes[place], category, path, label) for place, category, path, label in found]


@lru_cache(maxsize=NUM_ALIKE)
def _alive_at(
    ledger: Ledger, event_index: int, keeps: bool
) -> tuple[list[tuple[int, Category, str, str]], tuple[str, int, str, str]]:
    """What does not depend on sizes of an instant: (place in `Walk.sizes`, category, path, label)
    of what is alive, oldest first, and the instant's phase, micro-batch, label and path."""
    walked = _walk_ledger(ledger, keeps)
    events: Sequence[Any] = ledger.events
    tags = ledger.places[Tagged]
    tags = tags[: bisect_left(tags, _with_tags(events, event_index))]
    categories: dict[int, Category] = {events[place][0]: events[place][1] for place in tags}
    served = walked.sources[: walked.num_served(event_index)]
    alive = {source for source in served if source > 0} - {~n for n in served if n < 0}
    unknown: Category = "temporaries"
    found = []
    for source in sorted(alive):
        event = events[ledger.places[Allocated][source - 1]]
        found.append((source, categories.get(event[0], unknown), event.path, event.label))
    phase, micro_batch = phase_at(walked.marks, event_index)
    return found, (phase, micro_batch, *last_request(events, event_index))


def category_bytes(events: Sequence[Event], start: int, stop: int) -> dict[Category, list[int]]:
    """Live bytes by category: before event `start`, and after each allocation and release from
    there up to `stop`. A tag counts from the allocation or release that it follows."""
    held: dict[int, tuple[int, Category]] = {}
    now: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    points: dict[Category, list[int]] = {category: [] for category in CATEGORIES}

    def keep() -> None:
        for category, num_bytes in now.items():
            points[category].append(num_bytes)

    for index, event in enumerate(islice(events, stop)):
        if isinstance(event, Allocated | Scratch | Freed) and index >= start:
            keep()
        if isinstance(event, Allocated | Scratch):
            held[event.storage] = rounded(event.num_bytes), "temporaries"
            now["temporaries"] += held[event.storage][0]
        elif isinstance(event, Freed):
            num_bytes, category = held.pop(event.storage)
            now[category] -= num_bytes
        elif isinstance(event, Tagged) and event.storage in held and event.category in now:
            num_bytes, category = held[event.storage]
            now[category] -= num_bytes
            now[event.category] += num_bytes
            held[event.storage] = num_bytes, event.category
    keep()
    return points


def _with_tags(events: Sequence[Event], index: int) -> int:
    """One past `index` and the tags right behind it: they say what was just allocated."""
    end = index + 1
    while end < len(events) and isinstance(events[end], Tagged):
        end += 1
    return end


def last_request(events: Sequence[Event], index: int) -> tuple[str, str]:
    """Label and path of the request served last."""
    for place in range(index, -1, -1):
        event = events[place]
        if isinstance(event, Allocated | Scratch):
            return event.label, event.path
    return "", ""


def phase_at(marks: Sequence[tuple[int, Marked]], event_index: int) -> tuple[str, int]:
    """The phase that an event belongs to, and which micro-batch of its step it is in."""
    micro_batch = 1
    for index, mark in marks:
        if index >= event_index:
            return mark.phase, micro_batch
        if mark.phase == "zero_grad":
            micro_batch = 1
        elif mark.phase == "backward":
            micro_batch += 1
    return "", micro_batch
