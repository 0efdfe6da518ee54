"""timm's own Swin, built from a SwinConfig. Needs torch and timm."""

from __future__ import annotations

from typing import Any

from torch import nn

from planner.core.schema import SwinConfig
from planner.core.schema.setting import Attention
from planner.libraries.missing_operators import declare_missing_operators


def build(config: SwinConfig, attention: Attention) -> nn.Module:
    """`timm.models.SwinTransformer` or `SwinTransformerV2`, as `timm.create_model` would make it.

    `drop_rate` is timm's argument of that name, the dropout before the head. Another image size
    leaves the window as it is, as `create_model(name, img_size=...)` does.
    """
    declare_missing_operators()
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    arguments = _arguments(config)
    model: Any
    if config.version == 1:
        model = SwinTransformer(**arguments)
        set_attention(model, fused=attention == "sdpa")
    else:
        model = SwinTransformerV2(**arguments, pretrained_window_sizes=config.pretrained_windows)
    built: nn.Module = model
    return built


def _arguments(config: SwinConfig) -> dict[str, Any]:
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_channels,
        "num_classes": config.num_classes,
        "embed_dim": config.embed_dim,
        "depths": config.depths,
        "num_heads": config.num_heads,
        # One pair a stage: timm reads two bare numbers as one window's height and width.
        "window_size": tuple((window, window) for window in config.windows),
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
        "drop_rate": config.drop_rate,
        "attn_drop_rate": config.attn_drop_rate,
        "drop_path_rate": config.drop_path_rate,
    }


def set_attention(model: nn.Module, fused: bool) -> bool:
    """What `timm.layers.set_fused_attn` sets for models built after it, on this model only; whether
    it has anything to set."""
    switches = [module for module in model.modules() if hasattr(module, "fused_attn")]
    for module in switches:
        module.fused_attn = fused  # type: ignore[assignment]
    return bool(switches)
