"""The arguments of torchvision's class for a model. No torch: an emitted script has them too."""

from __future__ import annotations

from typing import Any

from planner.core.schema import SwinConfig


def class_arguments(model: SwinConfig) -> dict[str, Any]:
    """Of `SwinTransformer`, without the classes of its blocks."""
    return {
        "patch_size": [model.patch_size] * 2,
        "embed_dim": model.embed_dim,
        "depths": list(model.depths),
        "num_heads": list(model.num_heads),
        "window_size": [model.windows[0]] * 2,
        "mlp_ratio": model.mlp_ratio,
        "dropout": model.drop_rate,
        "attention_dropout": model.attn_drop_rate,
        "stochastic_depth_prob": model.drop_path_rate,
        "num_classes": model.num_classes,
    }
