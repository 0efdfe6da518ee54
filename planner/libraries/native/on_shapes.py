"""Our own Swin on shapes."""

from __future__ import annotations

from planner.core.schema import ResolvedSetting, SwinConfig
from planner.libraries.native.shapes import SwinTransformer
from planner.step.nn import Module
from planner.step.tensor import Device


def build(device: Device, config: SwinConfig, setting: ResolvedSetting) -> Module:
    """The model of `config` with the attention and checkpointing of a resolved `setting`."""
    return SwinTransformer(device, config, setting)
