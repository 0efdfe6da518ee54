"""What a device with the slow allocator would have recorded of its requests."""

from __future__ import annotations

from typing import Any

from tests.memory.slow_allocator import Block, SlowAllocator


def recorded_history(
    requests: list[int],
    *,
    start: int = 0,
    descending: bool = False,
    capacity: int | None = None,
    streams: list[int] | None = None,
) -> dict[str, Any]:
    """What a device with the slow allocator would have recorded from request `start` on. Stream n
    is called 1000 * n, as a device's names are no small numbers."""
    slow = SlowAllocator(capacity=capacity, descending=descending)
    blocks: dict[int, Block] = {}
    unrecorded = 0
    for index, entry in enumerate(requests):
        if index == start:
            unrecorded = len(slow.log)
        if entry >= 0:
            blocks[index] = slow.allocate(entry, streams[index] if streams else 0)
        else:
            slow.free(blocks.pop(~entry), requests[~entry])
    trace = [
        {"action": action, "addr": address, "size": size, "stream": 1000 * stream}
        for action, address, size, stream in slow.log[unrecorded:]
    ]
    segments = [recorded_segment(slow, number) for number in slow.sizes]
    return {"segments": segments, "device_traces": [trace], "allocator_settings": {}}


def recorded_segment(slow: SlowAllocator, number: int) -> dict[str, Any]:
    blocks = sorted((b for b in slow.blocks if b.segment == number), key=lambda b: b.offset)
    return {
        "device": 0,
        "address": slow.bases[number],
        "total_size": slow.sizes[number],
        "stream": 1000 * blocks[0].stream,
        "segment_pool_id": (0, 0),
        "blocks": [
            {"size": b.size, "state": "inactive" if b.free else "active_allocated"} for b in blocks
        ],
    }
