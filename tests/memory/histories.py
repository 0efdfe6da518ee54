"""What a device would have recorded of requests of whole segments."""

from __future__ import annotations

from typing import Any

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
