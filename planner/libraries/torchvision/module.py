"""torchvision's own Swin, built from a SwinConfig. Needs torch and torchvision."""

from __future__ import annotations

from typing import Any

from torch import nn

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.checkpointing import checkpoint_in_place
from planner.libraries.maps import chosen_stages
from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.torchvision.arguments import class_arguments


def build(config: SwinConfig, setting: TrainSetting) -> nn.Module:
    """`torchvision.models.SwinTransformer`; `drop_rate` is its `dropout`.

    torchvision checkpoints nothing, so its blocks, or its stages (their blocks without the merging
    after them), are wrapped.
    """
    declare_missing_operators()
    from torchvision.models import swin_transformer

    arguments = class_arguments(config)
    if config.version == 2:
        arguments["block"] = swin_transformer.SwinTransformerBlockV2
        arguments["downsample_layer"] = swin_transformer.PatchMergingV2
    model: Any = swin_transformer.SwinTransformer(**arguments)
    stages = model.features[1::2]  # patches, stage, merging, stage, merging, …
    if setting.checkpointing == "blocks":
        checkpoint_in_place(block for stage in stages for block in stage)
    elif setting.checkpointing != "none":
        checkpoint_in_place(chosen_stages(stages, setting))
    built: nn.Module = model
    return built
