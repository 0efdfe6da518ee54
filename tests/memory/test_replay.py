"""A steady step played until it recurs needs what it needs played to its end; the allocator's laws,
whatever is asked (what it serves from where, torch's own says: tests/emulated/test_on_torch.py);
and one walk over a ledger, by hand."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.units import KIB, MIB
from planner.ledger.ledger import Allocated, Computed, Event, Freed, Ledger, PhaseEnded, Tagged
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.caching_allocator import CachingAllocator, OutOfMemoryError
from planner.memory.profile import find_instant, live_storages, phase_growth, steady_step
from planner.memory.replay import (
    MAX_STEPS,
    SteadyPeaks,
    replay_steady,
    replay_within_limit,
    trace_steady,
)
from tests.memory.requests import played


@pytest.fixture(autouse=True)
def each_request_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short steps, too, are ended where they recur."""
    monkeypatch.setattr("planner.memory.replay._CHUNK_LENGTH", 1)


CONFIGS = (
    None,
    AllocatorConfig(expandable_segments=True),
    AllocatorConfig(max_split_bytes=32 * MIB),
)


def repeat_step(requests: list[int], start: int) -> list[int]:
    """The requests with those of the steady step, from entry `start` on, once more: what the step
    releases of the one before it, its repetition releases of the step."""
    period = len(requests) - start
    released = {~n for n in requests[start:] if n < 0}
    taken_over = [entry for entry in sorted(released) if entry < start]
    left = [i for i in range(start, len(requests)) if requests[i] >= 0 and i not in released]
    stands_for = dict(zip(taken_over, left, strict=True))
    again = [
        n if n >= 0 else n - period if ~n >= start else ~stands_for[~n] for n in requests[start:]
    ]
    return requests + again


def played_to_the_end(
    requests: list[int],
    start: int,
    config: AllocatorConfig | None = None,
    streams: Sequence[int] = (),
) -> SteadyPeaks:
    again = [*streams, *streams[start:]]
    allocated, reserved, _ = played(repeat_step(requests, start), config, again)
    held = max(start - 1, 0)
    repeated = len(requests) - 1  # the most allocated is that of the repetition
    return SteadyPeaks(max(allocated[repeated:]), max(reserved[held:]))


def random_steps(source: random.Random, *, grows: bool) -> tuple[list[int], int]:
    """Two steps that ask and release alike, and the entry of the second. Each hands on blocks that
    the next releases; where it `grows`, the first keeps some of its own besides."""
    largest = source.choice([1000 * KIB, 3 * MIB, 30 * MIB])
    asked: list[tuple[int, int]] = []  # (name, bytes), or (name, 0) to release it
    held: list[int] = []
    for name in range(20):
        asked.append((name, source.randint(1, largest)))
        held.append(name)
        while held and source.random() < 0.4:
            asked.append((held.pop(source.randrange(len(held))), 0))
    handed_on = {name: source.randrange(len(asked)) for name in held if source.random() < 0.4}
    asked += [(name, 0) for name in held if name not in handed_on]
    kept = {k: source.randint(1, 2 * largest) for k in range(len(asked)) if source.random() < 0.1}
    requests = [4096]
    start, before = 0, dict[int, int]()
    for step in (0, 1):
        start, entries = len(requests), dict[int, int]()
        for place, (name, size) in enumerate(asked):
            if size:
                entries[name] = len(requests)
                requests.append(size)
            else:
                requests.append(~entries[name])
            if step == 0 and grows and place in kept:
                requests.append(kept[place])
            requests += [~before[name] for name, at in handed_on.items() if before and at == place]
        before = entries
    return requests, start


@pytest.mark.parametrize("config", CONFIGS)
def test_a_step_played_until_it_recurs_needs_the_same_on_one_stream_and_on_several(
    config: AllocatorConfig | None,
) -> None:
    num_apart = 0
    for seed in range(60):
        requests, start = random_steps(random.Random(seed), grows=seed % 3 > 0)
        alone = played_to_the_end(requests, start, config)
        assert replay_steady(requests, start, config) == alone, seed
        # By size, so that both steps use their streams alike.
        streams = [(n if n >= 0 else requests[~n]) % 3 for n in requests]
        expected = played_to_the_end(requests, start, config, streams)
        assert replay_steady(requests, start, config, streams=streams) == expected, seed
        num_apart += expected != alone
    assert num_apart > 40


@pytest.mark.parametrize("config", CONFIGS)
def test_the_course_of_a_step_is_that_of_its_repetition(config: AllocatorConfig | None) -> None:
    for seed in range(40):
        requests, start = random_steps(random.Random(seed), grows=seed % 2 == 0)
        streams = [(n if n >= 0 else requests[~n]) % 3 for n in requests]
        again = [*streams, *streams[start:]]
        allocated, reserved, _ = played(repeat_step(requests, start), config, again)
        course = trace_steady(requests, start, config, streams=streams)
        assert course.allocated_bytes == allocated[len(requests) - 1 :], seed
        assert course.reserved_bytes == reserved[len(requests) - 1 :], seed
        peaks = replay_steady(requests, start, config, streams=streams)
        assert max(course.reserved_bytes) == peaks.reserved_bytes
        assert course.reserved_by_stream[-1] == peaks.reserved_by_stream


def test_a_step_that_cannot_be_played_again_has_one_course_from_what_came_before_it() -> None:
    course = trace_steady([4 * MIB, 6 * MIB, ~0], 1)
    assert course.reserved_bytes == [20 * MIB] * 3
    assert course.allocated_bytes == [4 * MIB, 10 * MIB, 6 * MIB]


def test_a_step_that_leaves_other_blocks_than_it_takes_over_is_played_once() -> None:
    # Played again, what it leaves would be counted twice.
    assert replay_steady([5, ~0, 6], 2) == SteadyPeaks(512, 2 * MIB)
    assert replay_steady([4 * MIB, 6 * MIB, ~0], 1) == SteadyPeaks(10 * MIB, 20 * MIB)
    # Nor may a block of one stream stand for one of another.
    assert replay_steady([MIB, MIB, ~0], 1, streams=[0, 1, 0]) == SteadyPeaks(2 * MIB, 4 * MIB)


def test_a_request_that_fails_frees_what_is_cached_and_is_served() -> None:
    # 60 MiB are cached when 80 are asked for: 140 without a limit, and within 100 the 60 go.
    step = [60 * MIB, ~0, 80 * MIB, ~2]
    assert replay_steady(step, 0).reserved_bytes == 140 * MIB
    found = replay_within_limit(step, 0, None, 100 * MIB)
    # The 80 then serve both, in every later step: the first alone retried.
    assert found == SteadyPeaks(80 * MIB, 80 * MIB, num_alloc_retries=1)
    # Two at once have no room, whatever is freed.
    assert replay_within_limit([60 * MIB, 80 * MIB, ~0, ~1], 0, None, 100 * MIB) is None
    # Where there is room for all, nothing is freed.
    assert replay_within_limit(step, 0, None, 140 * MIB) == SteadyPeaks(80 * MIB, 140 * MIB)


def test_a_step_may_free_cached_memory_each_time() -> None:
    # 80 MiB of the large pool, then 40 of the small one: within 100 each has to free the other's,
    # in the first step only the second of them.
    step = [80 * MIB, ~0, *[MIB] * 40, *(~entry for entry in range(2, 42))]
    found = replay_within_limit(step, 0, None, 100 * MIB)
    assert found.retries_each_step == 2
    assert found.num_alloc_retries == 2 * MAX_STEPS - 1
    assert found.reserved_bytes == 100 * MIB  # ten segments of 2 MiB beside the 80, then no more


SIZES = st.one_of(
    st.integers(0, 3000),
    st.integers(1, 2 * MIB),
    st.integers(MIB // 2, 24 * MIB),
    st.integers(8 * MIB, 300 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 11 * MIB, 12 * MIB, 20 * MIB, 64 * MIB]),
)
OPTIONS = st.sampled_from([config or AllocatorConfig() for config in CONFIGS])


@st.composite
def request_lists(draw: st.DrawFn) -> list[int]:
    """Requests, each perhaps followed by the release of one that is still held."""
    requests: list[int] = []
    held: list[int] = []
    for size in draw(st.lists(SIZES, max_size=60)):
        held.append(len(requests))
        requests.append(size)
        while held and draw(st.booleans()):
            requests.append(~held.pop(draw(st.integers(0, len(held) - 1))))
    return requests


@settings(max_examples=60, deadline=None)
@given(request_lists(), OPTIONS, st.integers(20, 900))
def test_blocks_never_overlap_and_everything_merges_back(
    requests: list[int], config: AllocatorConfig, capacity: int
) -> None:
    allocator = CachingAllocator(config, allowed_bytes=capacity * MIB)
    live: dict[int, tuple[int, int]] = {}
    blocks: dict[int, tuple[int, int]] = {}
    for index, entry in enumerate(requests):
        try:
            if entry > 0:
                blocks[index] = block = allocator.allocate(entry)
                start, end = block[0] * 512, (block[0] + block[1]) * 512
                assert end - start >= entry
                assert all(end <= s or e <= start for s, e in live.values())
                live[index] = start, end
            elif entry < 0 and ~entry in live:
                allocator.free(blocks[~entry])
                del live[~entry]
        except OutOfMemoryError:
            continue
        # The last page of an expandable segment may be over the limit, as in torch.
        reserved_bytes = sum(allocator.reserved_by_stream)
        assert reserved_bytes <= (capacity + 19 * config.expandable_segments) * MIB
        assert reserved_bytes >= sum(e - s for s, e in live.values())
    for index in live:
        allocator.free(blocks[index])
    allocator.empty_cache()
    assert not allocator.reserved_units


PRODUCT = Computed("aten.mm", "matmul", "float32", 1, 1, 1, "head")


def step(number: int) -> list[Event]:
    """Saves 1,000 B of activations, works in 2,000 B, and leaves a gradient of 512 B that the next
    step frees."""
    first = 10 * number
    return [
        Allocated(first + 1, 1000, "aten.mm", "head"), Tagged(first + 1, "activations"), PRODUCT,
        PhaseEnded("forward", number),
        PRODUCT, Allocated(first + 2, 2000, "aten.add"), PRODUCT, Freed(first + 1),
        Allocated(first + 3, 512, "aten.mm"), Tagged(first + 3, "gradients"), Freed(first + 2),
        PhaseEnded("backward", number),
        PhaseEnded("optimizer", number),
        Freed(first + 3),
        PhaseEnded("zero_grad", number),
    ]  # fmt: skip


EVENTS = [Allocated(99, 100, "weight"), Tagged(99, "parameters"), PhaseEnded("build", 0)]
LEDGER = Ledger((*EVENTS, *step(0), *step(1)), batch_size=2, num_parameters=25)
SECOND = len(EVENTS) + len(step(0))  # the second step's first event


def test_a_steady_step_is_the_last_one() -> None:
    found = steady_step(LEDGER)
    assert found.before_step == 512
    assert found.saved_bytes == 1024
    assert found.ends == (
        ("forward", 1536), ("backward", 1024), ("optimizer", 1024), ("zero_grad", 512),
    )  # fmt: skip
    assert (found.peak_bytes, found.peak_index) == (3584, SECOND + 5)
    assert found.steady_event == SECOND - 1


def test_a_phase_needs_what_live_bytes_rise_within_it() -> None:
    assert phase_growth(LEDGER, "forward") == 1024
    assert phase_growth(LEDGER, "backward") == 2048
    assert phase_growth(LEDGER, "optimizer") == 0
    assert phase_growth(LEDGER, "build") == 512


def test_an_instant_names_what_is_alive() -> None:
    found = find_instant(LEDGER, SECOND + 5)
    assert (found.phase, found.micro_batch, found.label) == ("backward", 1, "aten.add")
    assert found.by_category == {"parameters": 512, "activations": 1024, "temporaries": 2048}
    assert found.largest == (("", "aten.add", 2000), ("head", "aten.mm", 1000))
    # A tag right behind an allocation says what was just allocated.
    assert live_storages(LEDGER, SECOND)[-1] == (1000, "activations", "head", "aten.mm")
