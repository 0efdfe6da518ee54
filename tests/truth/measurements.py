"""Records of an invented H200: any, and those of a device that does just what is estimated."""

from __future__ import annotations

from planner.core.schema import DeviceInfo, MeasurementRecord, SwinConfig, TrainSetting

TINY = SwinConfig(image_size=(28, 28), depths=(1, 1), num_heads=(1, 2), embed_dim=16, num_classes=4)
H200 = DeviceInfo(kind="cuda", name="NVIDIA H200", total_bytes=150_121_545_728)


def record_of(setting: TrainSetting, **found: object) -> MeasurementRecord:
    return MeasurementRecord.model_validate(
        {
            "model": TINY, "setting": setting, "device": H200, "versions": {"torch": "2.11.0"},
            "date": "2026-11-20T00:00:00+00:00", "status": "measured", **found,
        }
    )  # fmt: skip
