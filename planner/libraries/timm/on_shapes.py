"""timm's Swin on shapes, of either version, checkpointed as `module.py` does it."""

from __future__ import annotations

from planner.core.schema import ResolvedSetting, SwinConfig
from planner.libraries.maps import chosen_stages
from planner.libraries.timm.shapes import SwinTransformer
from planner.libraries.timm.shapes_v2 import SwinTransformerV2
from planner.libraries.wrapping_on_shapes import checkpoint_in_place
from planner.step.nn import Module
from planner.step.tensor import Device


def build(device: Device, config: SwinConfig, setting: ResolvedSetting) -> Module:
    """timm's SwinTransformer or SwinTransformerV2, checkpointed as `module.py` does it."""
    kind = SwinTransformer if config.version == 1 else SwinTransformerV2
    model = kind(device, config, setting)
    if setting.checkpointing.startswith("stages"):
        checkpoint_in_place(chosen_stages(model.layers.modules, setting))
    return model
