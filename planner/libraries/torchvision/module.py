"""torchvision's own Swin, built from a SwinConfig. Needs torch and torchvision."""

from __future__ import annotations

from torch import nn

from planner.core.schema import SwinConfig
from planner.core.schema.setting import Attention
from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.torchvision.arguments import class_arguments


def build(config: SwinConfig, attention: Attention) -> nn.Module:
    """`torchvision.models.SwinTransformer`; `drop_rate` is its `dropout`."""
    declare_missing_operators()
    from torchvision.models import swin_transformer

    arguments = class_arguments(config)
    if config.version == 2:
        arguments["block"] = swin_transformer.SwinTransformerBlockV2
        arguments["downsample_layer"] = swin_transformer.PatchMergingV2
    built: nn.Module = swin_transformer.SwinTransformer(**arguments)
    return built
