"""Model + setting + GPU -> Estimate. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from planner.hardware.gpu import Gpu
from planner.schema import SwinConfig, TrainSetting


@dataclass(frozen=True)
class Throughput:
    """A predicted optimizer step in seconds and images/s; `basis` says what the rates rest on."""

    step_seconds: float
    images_per_second: float
    basis: str


@dataclass(frozen=True)
class Estimate:
    """A ledger judged. All sizes in bytes; `breakdown` is what is live at the peak instant."""

    model: SwinConfig
    setting: TrainSetting
    num_parameters: int
    breakdown: dict[str, int]
    saved_activation_bytes: int
    peak_live_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_total_bytes: int
    peak_at: str
    fits: bool | None
    budget_bytes: int | None
    headroom_bytes: int | None
    low_bytes: int
    high_bytes: int
    assumed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    throughput: Throughput | None = None
    live_bytes: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError


def estimate(
    model: str | SwinConfig,
    setting: TrainSetting | None = None,
    *,
    gpu: str | Gpu | None = None,
    memory_bytes: int | None = None,
    **overrides: Any,
) -> Estimate:
    """The memory and time of one training step, without running it."""
    raise NotImplementedError
