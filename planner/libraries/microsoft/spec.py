"""What the authors' own Swin can do (github.com/microsoft/Swin-Transformer)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.libraries.maps import feature_maps
from planner.libraries.microsoft.checkout import named_checkout
from planner.libraries.microsoft.names import PUBLISHED
from planner.libraries.spec import (
    Attention,
    LibrarySpec,
    at_least_blocks,
    no_pretrained_window,
    one_window,
)
from planner.schema import ResolvedSetting, SwinConfig

if TYPE_CHECKING:
    from torch import nn

    from planner.step.nn import Module
    from planner.step.tensor import Device


def _attentions(config: SwinConfig) -> tuple[Attention, ...]:
    return ("eager",)


def _faults(config: SwinConfig) -> list[str]:
    return [
        *one_window(config),
        *no_pretrained_window(config),
        *_undivided(config),
    ]


def _undivided(config: SwinConfig) -> list[str]:
    """Its classifier never pads: patches, windows and mergings must divide what they cut."""
    faults = [
        f"image_size: {side} is not a multiple of patch_size {config.patch_size}, and the "
        "authors' code does not pad"
        for side in dict.fromkeys(config.image_size)
        if side % config.patch_size
    ]
    maps = feature_maps(config)
    for stage, (height, width) in enumerate(maps):
        window = min(config.windows[stage], height, width)
        if height % window or width % window:
            faults.append(
                f"window_size: {window} does not divide the feature map of stage {stage} "
                f"({height}x{width}), and the authors' code does not pad"
            )
        if stage + 1 < len(maps) and (height % 2 or width % 2):
            faults.append(
                f"image_size: stage {stage} has an odd feature map ({height}x{width}), which the "
                "authors' patch merging refuses"
            )
    return faults


def _make_module(config: SwinConfig, setting: ResolvedSetting) -> nn.Module:
    from planner.libraries.microsoft.module import build

    return build(config, setting)


def _make_on_shapes(device: Device, config: SwinConfig, setting: ResolvedSetting) -> Module:
    from planner.libraries.microsoft.on_shapes import build

    return build(device, config, setting)


SPEC = LibrarySpec(
    name="microsoft",
    title="microsoft/Swin-Transformer",
    published=PUBLISHED,
    attentions=_attentions,
    checkpointings=at_least_blocks,
    make_module=_make_module,
    make_on_shapes=_make_on_shapes,
    faults=_faults,
    reentrant=("blocks",),
    installed=named_checkout,
    refused={"simmim|_moe_|swin_mlp": "is another kind of model and is not supported."},
)
