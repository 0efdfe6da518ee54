"""The arguments of the authors' classes for a model. No torch: an emitted script has them too."""

from __future__ import annotations

from typing import Any

from planner.core.schema import SwinConfig


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
