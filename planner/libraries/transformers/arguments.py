"""The arguments of transformers' configs for a model. No torch: an emitted script has them too."""

from __future__ import annotations

from typing import Any

from planner.core.schema import SwinConfig


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
