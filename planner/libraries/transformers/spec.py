"""What transformers' Swin can do."""

from __future__ import annotations

from typing import Any

from planner.core.schema import SwinConfig
from planner.libraries.maps import feature_maps
from planner.libraries.spec import (
    IMAGENET_22K,
    PRETRAINED_192,
    Attention,
    LibrarySpec,
    by_name,
    no_pretrained_window,
    one_window,
    published,
    required,
)

# The Swins on the Hugging Face hub, shipped here so that no hub is needed.
#
# Each is what `AutoModelForImageClassification.from_pretrained(name)` builds: the published
# configuration, with 1000 labels (21,841 for the ImageNet-22k weights) and drop path 0.1 at every
# size. A configuration of your own has 2 labels by default there, and 1000 here: set num_classes.

ORGANISATION = "microsoft/"


def _v1(size: str, window: int, image: int, suffix: str = "") -> SwinConfig:
    name = f"{ORGANISATION}swin-{size}-patch4-window{window}-{image}{suffix}"
    own = {"num_classes": IMAGENET_22K} if suffix else {}
    return published("transformers", name, size, 1, image, window, **own)


def _v2(size: str, window: int, image: int) -> SwinConfig:
    name = f"{ORGANISATION}swinv2-{size}-patch4-window{window}-{image}"
    return published("transformers", name, size, 2, image, window)


def _v2_pretrained(size: str) -> SwinConfig:
    name = f"{ORGANISATION}swinv2-{size}-patch4-window12-192-22k"
    return published("transformers", name, size, 2, 192, 12, num_classes=IMAGENET_22K)


def _v2_enlarged(size: str, window: int, image: int) -> SwinConfig:
    name = f"{ORGANISATION}swinv2-{size}-patch4-window12to{window}-192to{image}-22kto1k-ft"
    return published(
        "transformers", name, size, 2, image, window, pretrained_window_size=PRETRAINED_192
    )


PUBLISHED: dict[str, SwinConfig] = by_name(
    [
        *(_v1(size, 7, 224) for size in ("tiny", "small", "base", "large")),
        *(_v1(size, 12, 384) for size in ("base", "large")),
        *(_v1(size, 7, 224, "-in22k") for size in ("base", "large")),
        *(_v1(size, 12, 384, "-in22k") for size in ("base", "large")),
        *(_v2(size, window, 256) for size in ("tiny", "small", "base") for window in (8, 16)),
        *(_v2_pretrained(size) for size in ("base", "large")),
        *(_v2_enlarged(size, 16, 256) for size in ("base", "large")),
        *(_v2_enlarged(size, 24, 384) for size in ("base", "large")),
    ]
)


# The arguments of transformers' configs for a model. No torch: an emitted script has them too.


def config_arguments(model: SwinConfig) -> dict[str, Any]:
    """Of `SwinConfig` and `Swinv2Config`; names as in transformers 5.23."""
    height, width = model.image_size
    found: dict[str, Any] = {
        "image_size": height if height == width else [height, width],
        "patch_size": model.patch_size,
        "num_channels": model.in_channels,
        "embed_dim": model.embed_dim,
        "depths": list(model.depths),
        "num_heads": list(model.num_heads),
        "window_size": model.windows[0],
        "mlp_ratio": model.mlp_ratio,
        "qkv_bias": model.qkv_bias,
        "hidden_dropout_prob": model.drop_rate,
        "attention_probs_dropout_prob": model.attn_drop_rate,
        "drop_path_rate": model.drop_path_rate,
        "use_absolute_embeddings": model.absolute_position_embedding,
        "num_labels": model.num_classes,
    }
    if model.version == 2:
        found["pretrained_window_sizes"] = list(model.pretrained_windows)
    return found


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
