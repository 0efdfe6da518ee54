"""torchvision's Swin on shapes, of either version, wrapped as `module.py` wraps it."""

from __future__ import annotations

from planner.libraries.torchvision.shapes import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
)
from planner.libraries.torchvision.shapes_v2 import PatchMergingV2, SwinTransformerBlockV2
from planner.libraries.wrapping_on_shapes import checkpoint_in_place, chosen_stages
from planner.schema import ResolvedSetting, SwinConfig
from planner.step.nn import Module
from planner.step.tensor import Device


def build(device: Device, config: SwinConfig, setting: ResolvedSetting) -> Module:
    """torchvision's SwinTransformer of either version, wrapped as `module.py` wraps it."""
    if config.version == 1:
        model = SwinTransformer(device, config, SwinTransformerBlock, PatchMerging)
    else:
        model = SwinTransformer(device, config, SwinTransformerBlockV2, PatchMergingV2)
    stages = model.stages()
    if setting.checkpointing == "blocks":
        checkpoint_in_place(block for stage in stages for block in stage.modules)
    elif setting.checkpointing != "none":
        checkpoint_in_place(chosen_stages(stages, setting))
    return model
