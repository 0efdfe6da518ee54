"""The caching allocator's laws, whatever is asked. What it serves from where, and what it holds,
torch's own says (tests/emulated/test_on_torch.py)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.memory.allocator_config import AllocatorConfig
from planner.memory.caching_allocator import CachingAllocator, OutOfMemoryError

MIB = 1024**2
EXPANDABLE = AllocatorConfig(expandable_segments=True)


SIZES = st.one_of(
    st.integers(0, 3000),
    st.integers(1, 2 * MIB),
    st.integers(MIB // 2, 24 * MIB),
    st.integers(8 * MIB, 300 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 11 * MIB, 12 * MIB, 20 * MIB, 64 * MIB]),
)
CONFIGS = st.sampled_from(
    [
        AllocatorConfig(),
        EXPANDABLE,
        AllocatorConfig(max_split_bytes=32 * MIB),
        AllocatorConfig(garbage_collection_threshold=0.5),
        AllocatorConfig(roundup_power2_divisions=(4,) * 16),
        AllocatorConfig(large_segment_bytes=32 * MIB, max_non_split_rounding_bytes=32 * MIB),
    ]
)


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
@given(request_lists(), CONFIGS, st.integers(20, 900))
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
        assert allocator.reserved_bytes <= (capacity + 19 * config.expandable_segments) * MIB
        assert allocator.reserved_bytes >= sum(e - s for s, e in live.values())
    for index in live:
        allocator.free(blocks[index])
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
