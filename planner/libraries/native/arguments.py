"""The fields of native's own dataclass, `native_swin.SwinConfig`, for a model. No torch."""

from __future__ import annotations

from typing import Any

from planner.core.schema import SwinConfig

_SAME = (
    "version", "image_size", "patch_size", "in_channels", "num_classes", "embed_dim", "depths",
    "num_heads", "windows", "pretrained_windows", "mlp_ratio", "qkv_bias", "drop_rate",
    "attn_drop_rate", "drop_path_rate", "patch_norm", "absolute_position_embedding",
)  # fmt: skip


def class_arguments(model: SwinConfig) -> dict[str, Any]:
    return {name: getattr(model, name) for name in _SAME}
