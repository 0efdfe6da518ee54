"""The authors' Swin on shapes, of either version, checkpointed as `module.py` does it."""

from __future__ import annotations

from planner.core.schema import ResolvedSetting, SwinConfig
from planner.libraries.maps import chosen_stages
from planner.libraries.microsoft.shapes import SwinTransformer, SwinTransformerBlock
from planner.libraries.microsoft.shapes_v2 import SwinTransformerBlockV2
from planner.libraries.wrapping_on_shapes import checkpoint_in_place
from planner.step.nn import Module
from planner.step.tensor import Device


def build(device: Device, config: SwinConfig, setting: ResolvedSetting) -> Module:
    """The authors' SwinTransformer or SwinTransformerV2, checkpointed as `module.py` does it."""
    block = SwinTransformerBlock if config.version == 1 else SwinTransformerBlockV2
    model = SwinTransformer(device, config, setting, block)
    if setting.checkpointing.startswith("stages"):
        checkpoint_in_place(chosen_stages(model.layers, setting))
    return model
