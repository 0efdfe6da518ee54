"""What a watched training tells a TensorBoard writer that its loop has: rates, memory, the plan."""

from __future__ import annotations

from typing import Any

from planner.watching.expectation import Expectation

# Of an interval's line, and of what was expected, where that is known.
SHOWN = (
    "images_per_second", "step_seconds", "wait_share", "allocated_bytes", "reserved_bytes",
    "peak_allocated_bytes", "peak_reserved_bytes", "loss",
)  # fmt: skip
PLANNED = ("images_per_second", "peak_allocated_bytes", "peak_reserved_bytes")


def write_scalars(
    writer: Any, line: dict[str, Any], expected: Expectation | None, step: int
) -> None:
    """One interval, in any writer that has `add_scalar`."""
    add = getattr(writer, "add_scalar", None)
    if add is None:
        return
    for key in SHOWN:
        if isinstance(line.get(key), int | float):
            add(f"planner/{key}", line[key], step)
    for key in PLANNED:
        planned = getattr(expected, key, None)
        if planned is not None:
            add(f"planner/planned_{key}", planned, step)
