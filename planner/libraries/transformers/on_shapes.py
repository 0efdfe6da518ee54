"""transformers' Swin on shapes, of either version, checkpointed as `module.py` does it."""

from __future__ import annotations

from planner.core.schema import ResolvedSetting, SwinConfig
from planner.libraries.maps import chosen_stages
from planner.libraries.transformers.shapes import SwinForImageClassification, SwinStage
from planner.libraries.transformers.shapes_v2 import Swinv2ForImageClassification, Swinv2Stage
from planner.libraries.wrapping_on_shapes import checkpoint_in_place
from planner.step.nn import Module
from planner.step.tensor import Device


def build(device: Device, config: SwinConfig, setting: ResolvedSetting) -> Module:
    """SwinForImageClassification or Swinv2ForImageClassification, checkpointed as `module.py` does.

    `nested` is what version 1 does by itself: all stages and, inside them, all layers.
    """
    model: Module
    if config.version == 1:
        model = SwinForImageClassification(device, config, setting)
    else:
        model = Swinv2ForImageClassification(device, config)
    stages = [part for part in model.descendants() if isinstance(part, SwinStage | Swinv2Stage)]
    kind = setting.checkpointing.partition(":")[0]
    if kind in ("stages", "nested"):
        checkpoint_in_place(chosen_stages(stages, setting))
    if kind in ("blocks", "nested"):
        checkpoint_in_place(block for stage in stages for block in stage.blocks)
    return model
