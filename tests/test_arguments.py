"""The Python interface with arguments of other types and sizes than it is for."""

from __future__ import annotations

from planner import estimate
from planner.schema.model import MAX_SIZE


def test_the_largest_sizes_are_counted_in_order_and_do_not_fit() -> None:
    """Requests beyond 2^60 units: reserved bytes were less than live ones, and it fitted."""
    found = estimate(
        "native:swin_tiny", image_size=MAX_SIZE, in_channels=MAX_SIZE, batch_size=MAX_SIZE,
        gpu="rtx 3090",
    )  # fmt: skip
    assert found.fits is False
    assert found.peak_live_bytes <= found.peak_allocated_bytes <= found.peak_reserved_bytes
