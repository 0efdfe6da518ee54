"""A steady step played until it recurs needs what it needs played to its end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from planner.memory.allocator_config import AllocatorConfig
from planner.memory.replay import (
    MAX_STEPS,
    SteadyPeaks,
    replay,
    replay_steady,
    replay_within,
    steady_course,
)

KIB, MIB = 1024, 1024**2


@pytest.fixture(autouse=True)
def each_request_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short steps, too, are ended where they recur."""
    monkeypatch.setattr("planner.memory.replay._AT_ONCE", 1)


CONFIGS = (
    None,
    AllocatorConfig(expandable_segments=True),
    AllocatorConfig(max_split_bytes=32 * MIB),
    AllocatorConfig(roundup_power2_divisions=(4,) * 16),
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
    found = replay(repeat_step(requests, start), config, streams=[*streams, *streams[start:]])
    held = max(start - 1, 0)
    again = len(requests) - 1  # the most allocated is that of the repetition
    return SteadyPeaks(max(found.allocated_bytes[again:]), max(found.reserved_bytes[held:]))


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
        whole = replay(repeat_step(requests, start), config, streams=[*streams, *streams[start:]])
        course = steady_course(requests, start, config, streams=streams)
        assert course.allocated_bytes == list(whole.allocated_bytes[len(requests) - 1 :]), seed
        assert course.reserved_bytes == list(whole.reserved_bytes[len(requests) - 1 :]), seed
        peaks = replay_steady(requests, start, config, streams=streams)
        assert max(course.reserved_bytes) == peaks.reserved_bytes
        assert course.reserved_by_stream[-1] == peaks.reserved_by_stream


def test_the_course_is_of_the_playing_that_reserves_the_most() -> None:
    # Garbage is collected in the first playing, so that the second begins with less.
    config = AllocatorConfig(garbage_collection_threshold=0.5)
    requests = [60 * MIB, ~0, 10 * MIB, 70 * MIB, ~3, 30 * MIB, ~5, ~2]
    for allowed in (None, 150 * MIB, 200 * MIB, 10 * MIB):
        course = steady_course(requests, 2, config, allowed)
        assert len(course.reserved_bytes) == len(course.allocated_bytes) == 7
        peaks = replay_steady(requests, 2, config, allowed)
        assert max(course.reserved_bytes) == peaks.reserved_bytes, allowed
    # One that cannot be played again has one course, from what came before it.
    course = steady_course([4 * MIB, 6 * MIB, ~0], 1)
    assert course.reserved_bytes == [20 * MIB] * 3
    assert course.allocated_bytes == [4 * MIB, 10 * MIB, 6 * MIB]


def test_a_step_that_leaves_other_blocks_than_it_takes_over_is_played_once() -> None:
    # Played again, what it leaves would be counted twice.
    assert replay_steady([5, ~0, 6], 2) == SteadyPeaks(512, 2 * MIB)
    assert replay_steady([4 * MIB, 6 * MIB, ~0], 1) == SteadyPeaks(10 * MIB, 20 * MIB)
    # Nor may a block of one stream stand for one of another.
    assert replay_steady([MIB, MIB, ~0], 1, streams=[0, 1, 0]) == SteadyPeaks(2 * MIB, 4 * MIB)


def test_a_step_that_garbage_collection_cannot_save_is_played_without_the_limit() -> None:
    config = AllocatorConfig(garbage_collection_threshold=0.5)
    # 60 MiB are cached when 80 are asked for: collected under the limit, kept without one.
    requests = [60 * MIB, ~0, 80 * MIB]
    assert replay_steady(requests, 0, config, 100 * MIB).reserved_bytes == 80 * MIB
    assert replay_steady(requests, 0, config, None).reserved_bytes == 140 * MIB
    assert replay_steady(requests, 0, config, 70 * MIB).reserved_bytes == 140 * MIB


def test_a_request_that_fails_frees_what_is_cached_and_is_served() -> None:
    # 60 MiB are cached when 80 are asked for: 140 without a limit, and within 100 the 60 go.
    step = [60 * MIB, ~0, 80 * MIB, ~2]
    assert replay_steady(step, 0).reserved_bytes == 140 * MIB
    found = replay_within(step, 0, None, 100 * MIB)
    # The 80 then serve both, in every later step: the first alone retried.
    assert found == SteadyPeaks(80 * MIB, 80 * MIB, num_alloc_retries=1)
    # Two at once have no room, whatever is freed.
    assert replay_within([60 * MIB, 80 * MIB, ~0, ~1], 0, None, 100 * MIB) is None
    # Where there is room for all, nothing is freed.
    assert replay_within(step, 0, None, 140 * MIB) == SteadyPeaks(80 * MIB, 140 * MIB)


def test_a_step_may_free_cached_memory_each_time() -> None:
    # 80 MiB of the large pool, then 40 of the small one: within 100 each has to free the other's,
    # in the first step only the second of them.
    step = [80 * MIB, ~0, *[MIB] * 40, *(~entry for entry in range(2, 42))]
    found = replay_within(step, 0, None, 100 * MIB)
    assert found.retries_each_step == 2
    assert found.num_alloc_retries == 2 * MAX_STEPS - 1
    assert found.reserved_bytes == 100 * MIB  # ten segments of 2 MiB beside the 80, then no more
