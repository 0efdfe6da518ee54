"""What a ledger says of memory: its profile, an instant of it, and what a device makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.ledger import Allocated, Category, Computed, Event, Freed, Ledger, Marked, Tagged
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.replay import repeat_step, replay_steady

NUM_LARGEST = 8  # storages that an instant names


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
class Profile:
    """Live bytes of the steady step, each request rounded to 512 B.

    `ends` are (phase, live bytes at its end) in order, of the last step recorded; `before_step` is
    alive as it begins; `peak_index` the event at which the most was alive.
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
class Reading:
    """A ledger read for a device: live bytes over the steady step, its peak instant, and the
    allocator's peaks in bytes."""

    live: Profile
    peak: Instant
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def read_ledger(
    ledger: Ledger,
    workspace_bytes: int,
    config: AllocatorConfig | None,
    allowed_bytes: int | None = None,
) -> Reading:
    """What a device makes of a ledger: the steady step's live bytes and the allocator's peaks.

    `allowed_bytes` is what the allocator may reserve, where a memory fraction limits it.
    """
    live = profile(ledger)
    peak = instant(ledger, live.peak_index)
    asked = device_requests(ledger, live.steady_from, workspace_bytes)
    repeated = _repeated(asked.entries, asked.steady_from)
    played = replay_steady(repeated, config, asked.steady_from, allowed_bytes)
    return Reading(live, peak, played.peak_allocated_bytes, played.peak_reserved_bytes)


def rounded(num_bytes: int) -> int:
    """A request as the caching allocator rounds it: up to 512 B."""
    return (num_bytes + 511) & ~511


def profile(ledger: Ledger) -> Profile:
    """One walk over the ledger."""
    sizes: dict[int, int] = {}
    live = before = peak = peak_index = start = 0
    last = max(e.step for e in ledger.events if isinstance(e, Marked))
    ends: list[tuple[str, int]] = []
    steady = False
    for index, event in enumerate(ledger.events):
        kind = type(event)
        if kind is Allocated:
            size = sizes[event.storage] = (event.num_bytes + 511) & ~511  # type: ignore[union-attr]
            live += size
            if steady and live > peak:
                peak, peak_index = live, index
        elif kind is Freed:
            live -= sizes.pop(event.storage)  # type: ignore[union-attr]
        elif kind is Marked:
            if steady:
                ends.append((event.phase, live))  # type: ignore[union-attr]
            elif _begins(event, last):  # type: ignore[arg-type]
                steady, before, peak, peak_index, start = True, live, live, index, index
    return Profile(before, tuple(ends), peak, peak_index, start)


def growth_within(ledger: Ledger, phase: str) -> int:
    """How far live bytes rise, within `phase` of the last step that has it, over those alive as it
    begins: what the phase needs for itself, and gives back or keeps."""
    sizes: dict[int, int] = {}
    live = start = peak = growth = 0
    for event in ledger.events:
        if isinstance(event, Allocated):
            sizes[event.storage] = rounded(event.num_bytes)
            live += sizes[event.storage]
            peak = max(peak, live)
        elif isinstance(event, Freed):
            live -= sizes.pop(event.storage)
        elif isinstance(event, Marked):
            if event.phase == phase:
                growth = peak - start
            start = peak = live
    return growth


def _begins(mark: Marked, step: int) -> bool:
    """Whether `mark` is where optimizer step `step` begins."""
    if step == 0:
        return mark.phase == "build"
    return mark.phase == "zero_grad" and mark.step == step - 1


def instant(ledger: Ledger, event_index: int) -> Instant:
    """What is alive right after event `event_index`."""
    alive = find_alive(ledger.events, event_index)
    by_category: dict[Category, int] = {}
    for event, category in alive:
        by_category[category] = by_category.get(category, 0) + rounded(event.num_bytes)
    transient = [event for event, category in alive if category in TRANSIENT]
    transient.sort(key=lambda e: -e.num_bytes)
    phase, micro_batch = phase_at(ledger.events, event_index)
    label, path = last_request(ledger.events, event_index)
    return Instant(
        event_index,
        phase,
        micro_batch,
        label,
        path,
        sum(by_category.values()),
        by_category,
        tuple((e.path, e.label, e.num_bytes) for e in transient[:NUM_LARGEST]),
    )


TRANSIENT: tuple[Category, ...] = ("temporaries", "activations")


def find_alive(events: Sequence[Event], index: int) -> list[tuple[Allocated, Category]]:
    """The requests that are served right after event `index`, oldest first, and what each is."""
    alive: dict[int, Allocated] = {}
    categories: dict[int, Category] = {}
    for event in events[: _with_tags(events, index)]:
        if isinstance(event, Allocated):
            alive[event.storage] = event
        elif isinstance(event, Freed):
            alive.pop(event.storage)
            categories.pop(event.storage, None)
        elif isinstance(event, Tagged):
            categories[event.storage] = event.category
    return [(e, categories.get(storage, "temporaries")) for storage, e in alive.items()]


def _with_tags(events: Sequence[Event], index: int) -> int:
    """One past `index` and the tags right behind it: they say what was just allocated."""
    end = index + 1
    while end < len(events) and isinstance(events[end], Tagged):
        end += 1
    return end


def last_request(events: Sequence[Event], index: int) -> tuple[str, str]:
    """Label and path of the request served last."""
    for event in reversed(events[: index + 1]):
        if isinstance(event, Allocated):
            return event.label, event.path
    return "", ""


def phase_at(events: Sequence[Event], index: int) -> tuple[str, int]:
    """The phase that event `index` belongs to, and which micro-batch of its step it is in."""
    micro_batch = 1
    for event in events[:index]:
        if isinstance(event, Marked):
            if event.phase == "zero_grad":
                micro_batch = 1
            elif event.phase == "backward":
                micro_batch += 1
    mark = next((e for e in events[index:] if isinstance(e, Marked)), None)
    phase = mark.phase if mark else ""
    return phase, micro_batch


@dataclass(frozen=True)
class DeviceRequests:
    """A ledger as the allocator sees it: `entries` as `replay` takes them, the event behind each,
    and the entry at which the steady step begins."""

    entries: list[int]
    events: list[int]
    steady_from: int


def device_requests(ledger: Ledger, steady_event: int, workspace_bytes: int) -> DeviceRequests:
    """With the workspaces: one is asked for at the first matrix product of forward, another at
    backward's first. `steady_event` is the mark with which the steady step begins."""
    requests: list[int] = []
    events: list[int] = []
    entries: dict[int, int] = {}
    steady_from = 0
    wanted = list(_first_matmuls(ledger))
    for index, event in enumerate(ledger.events):
        if wanted and index == wanted[0]:
            requests.append(workspace_bytes)
            events.append(index)
            wanted.pop(0)
        if isinstance(event, Allocated):
            entries[event.storage] = len(requests)
            requests.append(event.num_bytes)
            events.append(index)
        elif isinstance(event, Freed):
            requests.append(~entries.pop(event.storage))
            events.append(index)
        elif index == steady_event:
            steady_from = len(requests)
    return DeviceRequests(requests, events, steady_from)


def _first_matmuls(ledger: Ledger) -> Iterator[int]:
    """Indices of the first matrix product in the first forward and in the first backward."""
    phase_is_new = True
    for index, event in enumerate(ledger.events):
        if isinstance(event, Marked):
            if event.phase == "backward":
                return
            phase_is_new = True
        elif phase_is_new and isinstance(event, Computed) and event.kind == "matmul":
            yield index
            phase_is_new = False


def _repeated(requests: list[int], steady_from: int) -> list[int]:
    """With the steady step once more: reserved bytes can still rise in the third step, as the
    first leaves other holes than the second. A trace's step may not repeat: then as it is."""
    try:
        return repeat_step(requests, steady_from)
    except ValueError:
        return requests
