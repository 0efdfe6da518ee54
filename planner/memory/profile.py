"""The memory that a ledger takes: one walk over its events, and what is read off it.

First the results (`Walk`, `Instant`, `SteadyStep`, `MemoryProfile`), then the allocator's peaks,
then the walk, then which storages are alive at an event. Live bytes count each request rounded to
512 B, as the caching allocator does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, islice
from typing import Literal

from planner.core.schema.record import Phase
from planner.core.torch_version import torch_version
from planner.core.units import MIB
from planner.ledger.ledger import (
    CATEGORIES,
    Allocated,
    BatchEvents,
    CacheFreed,
    Category,
    Computed,
    Event,
    Freed,
    Ledger,
    PhaseEnded,
    Scratch,
    Tagged,
)
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.caching_allocator import UNIT_BITS, round_request
from planner.memory.replay import Player, SteadyPeaks, replay_steady, replay_within_limit

NUM_LARGEST = 8  # storages that an instant names
TRANSIENT: tuple[Category, ...] = ("temporaries", "activations")
NUM_CACHED = 8  # walks and profiles: one ledger is profiled for every GPU of a list
NUM_CACHED_TEMPLATES = 24  # each of about 1 MiB: one step is walked at many batches
# cuBLASLt's workspace from torch 2.15 on, on every device (what torch 2.15's own code asks for).
LT_WORKSPACE_BYTES = MIB
# Matrix products that cuBLASLt does: those that add a bias (aten/src/ATen/native/cuda/Blas.cpp).
LT_PRODUCTS = frozenset(("aten.addmm", "aten._scaled_mm"))


@dataclass(frozen=True)
class Walk:
    """The requests and releases that one pass over the events finds, called entries here.

    `marks` has the ends of phases with their event indices. `sizes` has the bytes of each storage,
    after a 0 that stands for every workspace.

    By entry: `places` has the index in `sizes` of the storage that is requested, or its complement
    if it is released; `releases` the complement of the entry whose block is released (0: none);
    `event_indices` the event behind the entry; `streams` the number of its stream.
    `stream_names` has the names of the streams, the one that computes first.

    `workspaces` and `lt_workspaces` have the entries that request a workspace of cuBLAS or
    cuBLASLt: 0 bytes here, until a device is known. Up to torch 2.14 one is requested at the first
    matrix product of forward, another at backward's first; from 2.15 on one at each product, and
    released at once. `recorded_workspaces` has the places of those that torch requested as it was
    recorded. Before each entry of `emptied`, all in the first step, the allocator empties its
    cache.
    """

    sizes: list[int]
    num_events: int
    marks: list[tuple[int, PhaseEnded]]
    places: list[int]
    releases: list[int]
    event_indices: list[int]
    workspaces: list[int]
    lt_workspaces: list[int]
    streams: list[int]
    stream_names: tuple[str, ...]
    emptied: list[int]
    recorded_workspaces: list[int]

    @cached_property
    def live_by_entry(self) -> list[int]:
        """The live bytes before the first entry and after each, without workspaces."""
        changes = [round_request(num_bytes) for num_bytes in self.sizes]
        for place in self.recorded_workspaces:
            changes[place] = 0
        changes += [-change for change in reversed(changes)]  # changes[~place] is a release
        return list(accumulate(map(changes.__getitem__, self.places), initial=0))

    @cached_property
    def requests(self) -> list[int]:
        """The entries as `planner.memory.replay` takes them; workspaces have 0 bytes."""
        pairs = zip(self.releases, self.places, strict=True)
        return [release or self.sizes[place] for release, place in pairs]

    @property
    def move_indices(self) -> list[int]:
        """The event indices of all allocations and releases."""
        pairs = zip(self.places, self.event_indices, strict=True)
        return [index for place, index in pairs if place not in (0, ~0)]

    @cached_property
    def live_by_event(self) -> list[int]:
        """The live bytes after each event."""
        return [self.live_by_entry[self.num_entries(index)] for index in range(self.num_events)]

    def num_entries(self, event_index: int) -> int:
        """The number of entries up to and with an event."""
        return bisect_right(self.event_indices, event_index)

    @cached_property
    def steady(self) -> SteadyStep:
        """The last step of the ledger, from the mark that begins it."""
        last_step = max(mark.step for _, mark in self.marks)
        start = next(index for index, mark in self.marks if _is_step_start(mark, last_step))
        first_entry = self.num_entries(start)
        live = self.live_by_entry[first_entry:]
        peak = live.index(max(live))
        return SteadyStep(
            before_step=live[0],
            ends=tuple(
                (mark.phase, self.live_by_entry[self.num_entries(index)])
                for index, mark in self.marks
                if index > start
            ),
            peak_bytes=live[peak],
            peak_index=self.event_indices[first_entry + peak - 1] if peak else start,
            steady_event=start,
        )

    def fill_workspaces(self, workspace_bytes: int) -> list[int]:
        """`requests` for a device whose matrix products take `workspace_bytes`."""
        requests = list(self.requests)
        for entry in self.workspaces:
            requests[entry] = workspace_bytes
        for entry in self.lt_workspaces:
            requests[entry] = LT_WORKSPACE_BYTES
        return requests


@dataclass(frozen=True)
class Instant:
    """The storages that are alive right after one event: their bytes by category, and the largest.

    `phase` and `micro_batch` (counted from 1) say when; `label` and `path` name the last request.
    """

    phase: Phase | Literal[""]
    micro_batch: int
    label: str
    path: str
    by_category: dict[Category, int]
    largest: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class SteadyStep:
    """The live bytes of the steady step, the last one of a ledger.

    `before_step` are the live bytes as it begins; `ends` has (phase, live bytes at its end), in
    order. `peak_index` is the event after which `peak_bytes` were alive, `steady_event` the index
    of the mark that begins the step.
    """

    before_step: int
    ends: tuple[tuple[str, int], ...]
    peak_bytes: int
    peak_index: int
    steady_event: int

    @property
    def saved_bytes(self) -> int:
        """What the first forward saves for its backward: the growth since the step began."""
        return self.ends[0][1] - self.before_step


@dataclass(frozen=True)
class MemoryProfile:
    """A ledger's memory on a device: the live bytes of the steady step, its peak instant, and the
    allocator's peaks in bytes. `reserved_by_stream` has the reserved bytes of each stream, by name:
    no memory of one serves another."""

    live: SteadyStep
    peak: Instant
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    reserved_by_stream: dict[str, int]
    num_alloc_retries: int = 0
    retries_each_step: int = 0
    workspace_bytes: int = 0  # of the workspaces that the ledger itself requests


def profile_memory(
    ledger: Ledger, workspace_bytes: int, config: AllocatorConfig | None
) -> MemoryProfile:
    """The memory of a ledger on a device whose memory does not run out. `workspace_bytes` is its
    cuBLAS workspace."""
    return _profile_memory(ledger, workspace_bytes, config, has_kept_workspaces())


@lru_cache(maxsize=NUM_CACHED)
def _profile_memory(
    ledger: Ledger, workspace_bytes: int, config: AllocatorConfig | None, _keeps_workspaces: bool
) -> MemoryProfile:
    walked, requests, steady_entry = steady_requests(ledger, workspace_bytes)
    peaks = replay_steady(requests, steady_entry, config, walked.streams, walked.emptied)
    return _make_profile(ledger, walked, peaks, _hole_bytes(ledger, config))


def profile_within_limit(
    ledger: Ledger, workspace_bytes: int, config: AllocatorConfig | None, allowed_bytes: int
) -> MemoryProfile | None:
    """`profile_memory` where the driver has only `allowed_bytes`; None where memory runs out."""
    holes = _hole_bytes(ledger, config)
    if steady_step(ledger).peak_bytes > allowed_bytes - holes:
        return None
    walked, requests, steady_entry = steady_requests(ledger, workspace_bytes)
    peaks = replay_within_limit(
        requests, steady_entry, config, allowed_bytes - holes, walked.streams, walked.emptied
    )
    return None if peaks is None else _make_profile(ledger, walked, peaks, holes)


def _hole_bytes(ledger: Ledger, config: AllocatorConfig | None) -> int:
    """The bytes that a pool of CUDA graphs reserves beyond the peak of its blocks: no other request
    gets them."""
    pool = Player(config, None, ())
    pool.play(ledger.pool_requests, 0)
    return (pool.peak_reserved - pool.peak_allocated) << UNIT_BITS


def _make_profile(ledger: Ledger, walked: Walk, peaks: SteadyPeaks, holes: int) -> MemoryProfile:
    live = steady_step(ledger)
    computing, *other_streams = peaks.reserved_by_stream
    return MemoryProfile(
        live,
        find_instant(ledger, live.peak_index),
        peaks.allocated_bytes,
        peaks.reserved_bytes + holes,
        dict(zip(walked.stream_names, (computing + holes, *other_streams), strict=True)),
        peaks.num_alloc_retries,
        peaks.retries_each_step,
        sum(round_request(walked.sizes[place]) for place in walked.recorded_workspaces),
    )


def walk_ledger(ledger: Ledger) -> Walk:
    """The walk over a ledger. It is cached, as several readers need it."""
    return _walk_ledger(ledger, has_kept_workspaces())


@lru_cache(maxsize=NUM_CACHED)
def _walk_ledger(ledger: Ledger, keeps_workspaces: bool) -> Walk:
    walked = _walk_template(ledger.template, keeps_workspaces)
    if isinstance(ledger.events, BatchEvents):
        return replace(walked, sizes=[0, *ledger.events.sizes])
    return walked


def has_kept_workspaces() -> bool:
    """Whether torch requests cuBLAS's workspaces once and keeps them: up to torch 2.14."""
    return torch_version() < (2, 15)


@lru_cache(maxsize=NUM_CACHED_TEMPLATES)
def _walk_template(ledger: Ledger, keeps_workspaces: bool) -> Walk:
    """One pass over the events of `ledger`: the walk of all ledgers that have it as a template, but
    for its `sizes`. `keeps_workspaces`: torch requests a workspace once and keeps it."""
    events = ledger.events
    sizes, streams = [0], [0]  # by place: a workspace, then each storage
    live_places: dict[int, int] = {}  # by storage
    entries: list[tuple[int, int]] = []  # (place, or its complement, event index)
    workspaces, lt_workspaces, emptied, recorded_workspaces = (list[int]() for _ in range(4))
    marks: list[tuple[int, PhaseEnded]] = []
    stream_numbers = {"": 0}
    # Until the first backward ends; its thread and forward's request one workspace each.
    is_first_step = needs_workspace = True
    index = -1
    for index, event in enumerate(events):
        if isinstance(event, Allocated | Scratch):
            place = live_places[event.storage] = len(sizes)
            entries.append((place, index))
            sizes.append(event.num_bytes)
            streams.append(stream_numbers.setdefault(event.stream, len(stream_numbers)))
        elif isinstance(event, Freed):
            entries.append((~live_places.pop(event.storage), index))
        elif isinstance(event, Computed):
            if event.kind == "matmul" and not keeps_workspaces:
                is_lt = event.name in LT_PRODUCTS
                (lt_workspaces if is_lt else workspaces).append(len(entries))
                entries += [(0, index), (~0, index)]
            elif event.kind == "matmul" and needs_workspace:
                workspaces.append(len(entries))
                entries.append((0, index))
                needs_workspace = False
        elif isinstance(event, Tagged):
            if event.category == "workspace":
                recorded_workspaces.append(live_places[event.storage])
        elif isinstance(event, CacheFreed):
            if is_first_step:
                emptied.append(len(entries))
        elif isinstance(event, PhaseEnded):
            marks.append((index, event))
            is_first_step = is_first_step and event.phase != "backward"
            needs_workspace = is_first_step
    places, event_indices = [place for place, _ in entries], [index for _, index in entries]
    request_entries = [-1, *(entry for entry, place in enumerate(places) if place > 0)]  # by place
    releases = [  # a workspace is released right behind its request
        0 if place >= 0 else ~(entry - 1) if place == ~0 else ~request_entries[~place]
        for entry, place in enumerate(places)
    ]
    entry_streams = [streams[max(place, ~place)] for place in places]
    return Walk(
        sizes, index + 1, marks, places, releases, event_indices, workspaces, lt_workspaces,
        entry_streams, tuple(stream_numbers), emptied, recorded_workspaces,
    )  # fmt: skip


def steady_step(ledger: Ledger) -> SteadyStep:
    """The last step of the ledger, from the mark that begins it."""
    return walk_ledger(ledger).steady


def phase_growth(ledger: Ledger, phase: Phase) -> int:
    """How far live bytes rise within `phase`, in the last step that has it, over those at its
    beginning."""
    walked = walk_ledger(ledger)
    growth, before, start = 0, 0, 0
    for index, mark in walked.marks:
        if mark.phase == phase:
            growth = max(before, *walked.live_by_event[start : index + 1]) - before
        before, start = walked.live_by_event[index], index + 1
    return growth


def _is_step_start(mark: PhaseEnded, step: int) -> bool:
    """Whether optimizer step `step` begins at `mark`."""
    if step == 0:
        return mark.phase == "build"
    return mark.phase == "zero_grad" and mark.step == step - 1


def steady_requests(ledger: Ledger, workspace_bytes: int) -> tuple[Walk, list[int], int]:
    """The walk over a ledger, its requests with a device's workspaces, and the first entry of the
    steady step."""
    walked = walk_ledger(ledger)
    steady_entry = bisect_left(walked.event_indices, walked.steady.steady_event)
    return walked, walked.fill_workspaces(workspace_bytes), steady_entry


def find_instant(ledger: Ledger, event_index: int) -> Instant:
    """What is alive right after event `event_index`."""
    storages = live_storages(ledger, event_index)
    by_category: dict[Category, int] = {}
    for num_bytes, category, _, _ in storages:
        if category != "workspace":
            by_category[category] = by_category.get(category, 0) + round_request(num_bytes)
    transient = [(path, label, n) for n, category, path, label in storages if category in TRANSIENT]
    transient.sort(key=lambda storage: -storage[2])
    moment = _find_live(ledger.template, event_index, has_kept_workspaces())[1]
    largest = tuple(transient[:NUM_LARGEST])
    return Instant(*moment, by_category, largest)


def live_storages(ledger: Ledger, event_index: int) -> list[tuple[int, Category, str, str]]:
    """(bytes, category, path, label) of each storage that is alive right after an event, oldest
    first. The tags right behind the event count: they categorize what it allocated."""
    sizes = walk_ledger(ledger).sizes
    storages, _ = _find_live(ledger.template, event_index, has_kept_workspaces())
    return [(sizes[place], category, path, label) for place, category, path, label in storages]


@lru_cache(maxsize=NUM_CACHED_TEMPLATES)
def _find_live(
    ledger: Ledger, event_index: int, keeps_workspaces: bool
) -> tuple[list[tuple[int, Category, str, str]], tuple[Phase | Literal[""], int, str, str]]:
    """The parts of an instant that do not depend on sizes: (place in `Walk.sizes`, category, path,
    label) of each live storage, oldest first, and the phase, micro-batch, label and path."""
    walked = _walk_ledger(ledger, keeps_workspaces)
    events = ledger.events
    end = event_index + 1
    while end < len(events) and isinstance(events[end], Tagged):
        end += 1
    tags = (event for event in islice(events, end) if isinstance(event, Tagged))
    categories = {tag.storage: tag.category for tag in tags}
    requests = [event for event in events if isinstance(event, Allocated | Scratch)]
    places = walked.places[: walked.num_entries(event_index)]
    live = {place for place in places if place > 0} - {~place for place in places if place < 0}
    default: Category = "temporaries"
    storages = []
    for place in sorted(live):
        event = requests[place - 1]
        storages.append((place, categories.get(event.storage, default), event.path, event.label))
    num_requests = bisect_right(ledger.indices[Allocated], event_index)
    last = requests[num_requests - 1] if num_requests else Allocated(0, 0, "")
    phase, micro_batch = _find_phase(walked.marks, event_index)
    return storages, (phase, micro_batch, last.label, last.path)


def category_bytes(events: Sequence[Event], start: int, stop: int) -> dict[Category, list[int]]:
    """Live bytes by category: before event `start`, and after each allocation and release from
    there up to `stop`. A tag counts from the allocation or release that it follows."""
    storages: dict[int, tuple[int, Category]] = {}
    totals: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    points: dict[Category, list[int]] = {category: [] for category in CATEGORIES}

    def add_point() -> None:
        for category, num_bytes in totals.items():
            points[category].append(num_bytes)

    for index, event in enumerate(islice(events, stop)):
        if isinstance(event, Allocated | Scratch | Freed) and index >= start:
            add_point()
        if isinstance(event, Allocated | Scratch):
            storages[event.storage] = round_request(event.num_bytes), "temporaries"
            totals["temporaries"] += storages[event.storage][0]
        elif isinstance(event, Freed):
            num_bytes, category = storages.pop(event.storage)
            totals[category] -= num_bytes
        elif isinstance(event, Tagged) and event.storage in storages and event.category in totals:
            num_bytes, category = storages[event.storage]
            totals[category] -= num_bytes
            totals[event.category] += num_bytes
            storages[event.storage] = num_bytes, event.category
    add_point()
    return points


def _find_phase(
    marks: Sequence[tuple[int, PhaseEnded]], event_index: int
) -> tuple[Phase | Literal[""], int]:
    """The phase of an event, and the number of its micro-batch in its step, from 1."""
    micro_batch = 1
    for index, mark in marks:
        if index >= event_index:
            return mark.phase, micro_batch
        if mark.phase == "zero_grad":
            micro_batch = 1
        elif mark.phase == "backward":
            micro_batch += 1
    return "", micro_batch
