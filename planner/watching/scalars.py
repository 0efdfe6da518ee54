"""What a watched training writes for TensorBoard: the loop's rates and memory, and the plan's."""

from __future__ import annotations

from os import PathLike
from typing import Any

from planner.errors import PlannerError
from planner.watching.expectation import Expectation

# Of an interval's line, and of what was expected, where that is known.
SHOWN = (
    "images_per_second", "step_seconds", "wait_share", "allocated_bytes", "reserved_bytes",
    "peak_allocated_bytes", "peak_reserved_bytes", "loss",
)  # fmt: skip
PLANNED = ("images_per_second", "peak_allocated_bytes", "peak_reserved_bytes")


def summary_writer(folder: str | PathLike[str]) -> Any:
    """torch's SummaryWriter. Raises PlannerError where torch or tensorboard is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise PlannerError(
            "TensorBoard's files need torch and tensorboard, and one is not installed.",
            "Install it with: pip install 'planner[tensorboard]'",
        ) from None
    return SummaryWriter(str(folder))


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
