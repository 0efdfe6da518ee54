"""Small cases of window attention for the tests: one image of 8 × 8 tokens, windows of 4."""

from __future__ import annotations

from typing import Any

from planner.schema.bench import BenchCase, BenchRecord, Timing


def small_case(**fields: Any) -> BenchCase:
    return BenchCase.model_validate(
        {
            "library": "native", "version": 1, "shape": "small", "batch_size": 1,
            "feature_map": (8, 8), "channels": 8, "heads": 2, "window": 4, **fields,
        }
    )  # fmt: skip


def record(median: float, low: float, high: float, **fields: Any) -> BenchRecord:
    """A record of a small case that took `median` seconds."""
    timing = Timing(median=median, low=low, high=high, certain=True, samples=20)
    return BenchRecord.model_validate(
        {
            "case": small_case(),
            "status": "measured",
            "forward": timing,
            "backward": timing,
            "both": timing,
            "device": {"kind": "cpu", "name": "a CPU", "total_bytes": 1 << 30},
            "versions": {"torch": "2.12.0"},
            "date": "2026-11-22T00:00:00+00:00",
            **fields,
        }
    )
