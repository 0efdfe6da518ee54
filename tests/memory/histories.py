"""What a device with the slow allocator would have recorded of its requests."""

from __future__ import annotations

from typing import Any

from tests.memory.slow_allocator import Block, SlowAllocator


def recorded_history(requests: list[int]) -> dict[str, Any]:
    """What a device with the slow allocator would have recorded."""
    slow = SlowAllocator()
    blocks: dict[int, Block] = {}
    for index, entry in enumerate(requests):
        if entry >= 0:
            blocks[index] = slow.allocate(entry, 0)
        else:
            slow.free(blocks.pop(~entry), requests[~entry])
    trace = [
        {"action": action, "addr": address, "size": size, "stream": 1000 * stream}
        for action, address, size, stream in slow.log
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
