"""What a person says and what crosses a process: validated once, here."""

from planner.schema.any_model import FactoryModel, Model, NamedModel
from planner.schema.model import Library, SwinConfig
from planner.schema.record import (
    DeviceInfo,
    MeasurementRecord,
    ProbeStatus,
)
from planner.schema.setting import ResolvedSetting, TrainSetting
from planner.schema.validation import parse

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
