"""Requests of an allocator: `n >= 0` asks for n bytes, `~index` releases request `index`."""

import random
from collections.abc import Sequence
from typing import Any

from planner.core.units import KIB, MIB
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.replay import Player, trace_allocated


def random_requests(source: random.Random, count: int) -> list[int]:
    """Requests of a few recurring sizes in every range, most of them released again."""
    sizes = [source.randint(1, 2 * MIB) for _ in range(6)]
    sizes += [source.randint(MIB, 12 * MIB) for _ in range(6)]
    sizes += [source.randint(10 * MIB, 90 * MIB) for _ in range(5)]
    sizes += [0, 512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 11 * MIB, 11 * MIB + 200 * KIB]
    requests: list[int] = []
    held: list[int] = []
    while len(requests) < count:
        if held and source.random() < len(held) / 24:
            requests.append(~held.pop(source.randrange(len(held))))
        else:
            held.append(len(requests))
            requests.append(source.choice(sizes))
    return requests


def random_streams(source: random.Random, requests: list[int], num_streams: int) -> list[int]:
    """A stream for each request, all of them used; a release has that of what it releases."""
    streams: list[int] = []
    for entry in requests:
        streams.append(source.randrange(num_streams) if entry >= 0 else streams[~entry])
    return streams


def played(
    requests: Sequence[int],
    config: AllocatorConfig | None = None,
    streams: Sequence[int] = (),
    allowed_bytes: int | None = None,
) -> tuple[list[int], list[int], int]:
    """Bytes allocated and reserved after each request, and how often cached memory was freed."""
    player = Player(config, allowed_bytes, streams)
    player.play(requests, 0)
    allocated = trace_allocated(requests, player.blocks)
    reserved = [sum(by_stream) for by_stream in player.trace_reserved(len(requests))]
    return allocated[1:], reserved[1:], player.allocator.num_alloc_retries


# What a device would have recorded of requests of whole segments.

TOP = 1 << 46


def recorded_history(requests: list[int]) -> dict[str, Any]:
    """Each of some units of 2 MiB, 10 MiB at least: of a segment of its own. Releases come last."""
    trace: list[dict[str, Any]] = []
    segments: list[dict[str, Any]] = []
    for entry in requests:
        if entry >= 0:
            address = TOP + sum(segment["total_size"] for segment in segments)
            block = {"size": entry, "state": "active_allocated"}
            segments.append({
                "device": 0, "address": address, "total_size": entry, "stream": 0,
                "segment_pool_id": (0, 0), "blocks": [block],
            })  # fmt: skip
            actions: tuple[str, ...] = ("segment_alloc", "alloc")
        else:
            segments[~entry]["blocks"][0]["state"] = "inactive"
            actions = ("free_completed",)
        made = segments[~entry if entry < 0 else -1]
        asked = {"addr": made["address"], "size": made["total_size"], "stream": 0}
        trace += [{"action": action, **asked} for action in actions]
    return {"segments": segments, "device_traces": [trace], "allocator_settings": {}}
