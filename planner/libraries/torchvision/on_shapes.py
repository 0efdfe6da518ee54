"""torchvision's Swin on shapes, of either version, wrapped as `module.py` wraps it."""

from __future__ import annotations

from planner.core.schema import ResolvedSetting, SwinConfig
from planner.libraries.maps import chosen_stages
from planner.libraries.torchvision.shapes import SwinTransformer, SwinTransformerBlock
from planner.libraries.torchvision.shapes_v2 import SwinTransformerBlockV2
from planner.libraries.wrapping_on_shapes import checkpoint_in_place
from planner.step.nn import Module
from planner.step.tensor import Device


def build(device: Device, config: SwinConfig, setting: ResolvedSetting) -> Module:
    """torchvision's SwinTransformer of either version, wrapped as `module.py` wraps it."""
    block = SwinTransformerBlock if config.version == 1 else SwinTransformerBlockV2
    model = SwinTransformer(device, config, block)
    stages = model.stages()
    if setting.checkpointing == "blocks":
        checkpoint_in_place(block for stage in stages for block in stage.modules)
    elif setting.checkpointing != "none":
        checkpoint_in_place(chosen_stages(stages, setting))
    return model
