"""What timm's Swin can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.libraries.spec import (
    Attention,
    LibrarySpec,
    at_least_blocks,
    no_pretrained_window,
    required,
)
from planner.libraries.timm.names import PUBLISHED, TAGGED
from planner.schema import ResolvedSetting, SwinConfig

if TYPE_CHECKING:
    from torch import nn

    from planner.step.nn import Module
    from planner.step.tensor import Device


def _attentions(config: SwinConfig) -> tuple[Attention, ...]:
    """Version 1 has a fused attention that timm leaves off; version 2 has none."""
    return ("eager", "sdpa") if config.version == 1 else ("eager",)


def _faults(config: SwinConfig) -> list[str]:
    return [
        *required(config, patch_norm=True, absolute_position_embedding=False),
        *no_pretrained_window(config),
    ]


def _make_module(config: SwinConfig, setting: ResolvedSetting) -> nn.Module:
    from planner.libraries.timm.module import build

    return build(config, setting)


def _make_on_shapes(device: Device, config: SwinConfig, setting: ResolvedSetting) -> Module:
    from planner.libraries.timm.on_shapes import build

    return build(device, config, setting)


SPEC = LibrarySpec(
    name="timm",
    title="timm",
    published=PUBLISHED,
    tagged=TAGGED,
    attentions=_attentions,
    checkpointings=at_least_blocks,
    make_module=_make_module,
    make_on_shapes=_make_on_shapes,
    faults=_faults,
    block_classes=("SwinTransformerBlock", "SwinTransformerV2Block"),
)
