"""What the authors' own Swin can do (github.com/microsoft/Swin-Transformer)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from planner.core.schema import SwinConfig
from planner.libraries.maps import feature_maps
from planner.libraries.spec import (
    IMAGENET_22K,
    PRETRAINED_192,
    LibrarySpec,
    by_name,
    no_pretrained_window,
    one_window,
    only_eager,
    published,
)

# The configurations of github.com/microsoft/Swin-Transformer, by the names of their YAML files.
#
# Each with the drop path its file sets; the class count follows from its data set. SimMIM, MoE and
# MLP configurations are other models.


def _v1(size: str, window: int, image: int, suffix: str, rate: float) -> SwinConfig:
    name = f"swin_{size}_patch4_window{window}_{image}{suffix}"
    own = {"num_classes": IMAGENET_22K} if suffix == "_22k" else {}
    return published("microsoft", name, size, 1, image, window, drop_path_rate=rate, **own)


def _v2(size: str, window: int, rate: float) -> SwinConfig:
    name = f"swinv2_{size}_patch4_window{window}_256"
    return published("microsoft", name, size, 2, 256, window, drop_path_rate=rate)


def _v2_pretrained(size: str) -> SwinConfig:
    return published(
        "microsoft", f"swinv2_{size}_patch4_window12_192_22k", size, 2, 192, 12,
        num_classes=IMAGENET_22K, drop_path_rate=0.2,
    )  # fmt: skip


def _v2_enlarged(size: str, window: int, image: int) -> SwinConfig:
    return published(
        "microsoft", f"swinv2_{size}_patch4_window12to{window}_192to{image}_22kto1k_ft",
        size, 2, image, window, pretrained_window_size=PRETRAINED_192, drop_path_rate=0.2,
    )  # fmt: skip


PUBLISHED: dict[str, SwinConfig] = by_name(
    [
        _v1("tiny", 7, 224, "", 0.2),
        _v1("tiny", 7, 224, "_22k", 0.1),
        _v1("tiny", 7, 224, "_22kto1k_finetune", 0.1),
        _v1("small", 7, 224, "", 0.3),
        _v1("small", 7, 224, "_22k", 0.2),
        _v1("small", 7, 224, "_22kto1k_finetune", 0.2),
        _v1("base", 7, 224, "", 0.5),
        _v1("base", 7, 224, "_22k", 0.2),
        _v1("base", 7, 224, "_22kto1k_finetune", 0.2),
        _v1("base", 12, 384, "_finetune", 0.5),
        _v1("base", 12, 384, "_22kto1k_finetune", 0.2),
        _v1("large", 7, 224, "_22k", 0.2),
        _v1("large", 7, 224, "_22kto1k_finetune", 0.2),
        _v1("large", 12, 384, "_22kto1k_finetune", 0.2),
        published(
            "microsoft", "swin_tiny_c24_patch4_window8_256", "tiny", 1, 256, 8,
            num_heads=(4, 8, 16, 32), drop_path_rate=0.2,
        ),
        *(_v2("tiny", window, 0.2) for window in (8, 16)),
        *(_v2("small", window, 0.3) for window in (8, 16)),
        *(_v2("base", window, 0.5) for window in (8, 16)),
        *(_v2_pretrained(size) for size in ("base", "large")),
        *(_v2_enlarged(size, 16, 256) for size in ("base", "large")),
        *(_v2_enlarged(size, 24, 384) for size in ("base", "large")),
    ]
)  # fmt: skip


# The arguments of the authors' classes for a model. No torch: an emitted script has them too.


def class_arguments(model: SwinConfig) -> dict[str, Any]:
    """Of `SwinTransformer` and `SwinTransformerV2`."""
    height, width = model.image_size
    found: dict[str, Any] = {
        "img_size": height if height == width else (height, width),
        "patch_size": model.patch_size,
        "in_chans": model.in_channels,
        "num_classes": model.num_classes,
        "embed_dim": model.embed_dim,
        "depths": list(model.depths),
        "num_heads": list(model.num_heads),
        "window_size": model.windows[0],
        "mlp_ratio": model.mlp_ratio,
        "qkv_bias": model.qkv_bias,
        "drop_rate": model.drop_rate,
        "attn_drop_rate": model.attn_drop_rate,
        "drop_path_rate": model.drop_path_rate,
        "ape": model.absolute_position_embedding,
        "patch_norm": model.patch_norm,
    }
    if model.version == 2:
        found["pretrained_window_sizes"] = list(model.pretrained_windows)
    return found


# Where the authors' repository lies: it is no package.

CHECKOUT_VARIABLE = "SWIN_TRANSFORMER_CHECKOUT"


def named_checkout() -> Path | None:
    """The folder that `git clone` made; None where the environment names none."""
    folder = os.environ.get(CHECKOUT_VARIABLE)
    return Path(folder) if folder else None


def _faults(config: SwinConfig) -> list[str]:
    return [*one_window(config), *no_pretrained_window(config), *_undivided(config)]


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


SPEC = LibrarySpec(
    name="microsoft",
    title="microsoft/Swin-Transformer",
    published=PUBLISHED,
    attentions=only_eager,
    faults=_faults,
    reentrant=("blocks",),
    installed=named_checkout,
    refused={"simmim|_moe_|swin_mlp": "is another kind of model and is not supported."},
)
