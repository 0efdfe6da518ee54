"""What transformers' Swin can do."""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.maps import feature_maps
from planner.libraries.spec import (
    Attention,
    LibrarySpec,
    no_pretrained_window,
    one_window,
    required,
)
from planner.libraries.transformers.names import PUBLISHED


def _attentions(config: SwinConfig) -> tuple[Attention, ...]:
    """Version 1 goes through the library's attention interface; version 2 writes it out."""
    return ("sdpa", "eager") if config.version == 1 else ("eager",)


def _faults(config: SwinConfig) -> list[str]:
    return [
        *required(config, patch_norm=True),
        *one_window(config),
        *no_pretrained_window(config),
        *(_window_beyond_feature_map(config) if config.version == 1 else ()),
        *(_position_for_padding(config) if config.version == 1 else ()),
        *(_absolute_positions(config) if config.version == 2 else ()),
    ]


def _window_beyond_feature_map(config: SwinConfig) -> list[str]:
    """Version 1 clamps the window but not the table of biases, and fails in the first forward."""
    return [
        f"window_size: {config.windows[stage]} is larger than the feature map of stage {stage} "
        f"({height}x{width}), which fails in version 1 there"
        for stage, (height, width) in enumerate(feature_maps(config))
        if config.windows[stage] > min(height, width)
    ]


def _position_for_padding(config: SwinConfig) -> list[str]:
    """Version 1 pads an image to whole patches, makes no position for the patches that this adds,
    and fails in the first forward."""
    if not config.absolute_position_embedding:
        return []
    return [
        f"image_size: {side} is not a multiple of patch_size {config.patch_size}, which fails in "
        "version 1 there with absolute_position_embedding"
        for side in dict.fromkeys(config.image_size)
        if side % config.patch_size
    ]


def _absolute_positions(config: SwinConfig) -> list[str]:
    """Version 2 makes one position more than there are patches, and fails in the first forward."""
    return [*required(config, absolute_position_embedding=False)]


def _frozen_names(num_stages: int) -> tuple[str, ...]:
    if num_stages == 0:
        return ()
    parts = ("embeddings", *(f"encoder.layers.{stage}" for stage in range(num_stages)))
    return tuple(f"{model}.{part}" for model in ("swin", "swinv2") for part in parts)


SPEC = LibrarySpec(
    name="transformers",
    title="transformers",
    published=PUBLISHED,
    attentions=_attentions,
    faults=_faults,
    frozen_names=_frozen_names,
    takes_adapters=lambda config: True,
    refused={
        "simmim": "is a masked-image model, not a classifier: see "
        "transformers:SwinForMaskedImageModeling."
    },
    block_classes=("SwinLayer", "Swinv2Layer"),
    is_on_shapes=False,
)
