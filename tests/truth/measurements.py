"""Records of an invented H200: any, and those of a device that does just what is estimated."""

from __future__ import annotations

from planner.core.schema import DeviceInfo, MeasurementRecord, SwinConfig, TrainSetting
from tests.truth.compare import estimate_of

TINY = SwinConfig(image_size=(28, 28), depths=(1, 1), num_heads=(1, 2), embed_dim=16, num_classes=4)
H200 = DeviceInfo(kind="cuda", name="NVIDIA H200", total_bytes=150_121_545_728)


def record_of(setting: TrainSetting, **found: object) -> MeasurementRecord:
    return MeasurementRecord.model_validate(
        {
            "model": TINY, "setting": setting, "device": H200, "versions": {"torch": "2.11.0"},
            "date": "2026-11-20T00:00:00+00:00", "status": "measured", **found,
        }
    )  # fmt: skip


def exact_record(batch_size: int, context: int) -> MeasurementRecord:
    """A device that does just what the estimate says, with another context."""
    setting = TrainSetting(batch_size=batch_size, attention="sdpa")
    estimate = estimate_of(record_of(setting))
    return record_of(
        setting,
        peak_allocated_bytes=estimate.peak_allocated_bytes,
        peak_reserved_bytes=estimate.peak_reserved_bytes,
        device_bytes=estimate.peak_reserved_bytes + context,
    )
