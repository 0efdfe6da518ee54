"""What a person says and what crosses a process: validated once, here."""

from planner.core.schema.model import FactoryModel, Library, Model, NamedModel, SwinConfig
from planner.core.schema.record import (
    DeviceInfo,
    MeasurementRecord,
    ProbeStatus,
)
from planner.core.schema.setting import ResolvedSetting, TrainSetting
from planner.core.schema.validation import parse

__all__ = [
    "DeviceInfo",
    "FactoryModel",
    "Library",
    "MeasurementRecord",
    "Model",
    "NamedModel",
    "ProbeStatus",
    "ResolvedSetting",
    "SwinConfig",
    "TrainSetting",
    "parse",
]
