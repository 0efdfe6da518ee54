"""transformers' own Swin, built from a SwinConfig. Needs torch and transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.wrapping import checkpoint_in_place, chosen_stages
from planner.schema import SwinConfig, TrainSetting


def build(config: SwinConfig, setting: TrainSetting) -> nn.Module:
    """`SwinForImageClassification` or `Swinv2ForImageClassification`, of random weights.

    `drop_rate` is `hidden_dropout_prob`, `num_classes` is `num_labels`.
    """
    # transformers imports torchvision where it finds it.
    declare_missing_operators()
    from transformers import SwinConfig as Swinv1Config
    from transformers import (
        SwinForImageClassification,
        Swinv2Config,
        Swinv2ForImageClassification,
    )

    arguments = _arguments(config)
    model: Any
    if config.version == 1:
        own = Swinv1Config(**arguments, attn_implementation=setting.attention)
        model = SwinForImageClassification(own)
        stages = model.swin.encoder.layers
    else:
        own = Swinv2Config(**arguments, pretrained_window_sizes=config.pretrained_windows)
        model = Swinv2ForImageClassification(own)
        stages = model.swinv2.encoder.layers
    _checkpoint(model, stages, config, setting)
    built: nn.Module = model
    return built


def _arguments(config: SwinConfig) -> dict[str, Any]:
    height, width = config.image_size
    return {
        "image_size": height if height == width else config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.in_channels,
        "embed_dim": config.embed_dim,
        "depths": config.depths,
        "num_heads": config.num_heads,
        "window_size": config.windows[0],
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": config.drop_rate,
        "attention_probs_dropout_prob": config.attn_drop_rate,
        "drop_path_rate": config.drop_path_rate,
        "use_absolute_embeddings": config.absolute_position_embedding,
        "num_labels": config.num_classes,
    }


def _checkpoint(model: Any, stages: Any, config: SwinConfig, setting: TrainSetting) -> None:
    """All stages, and in version 1 all blocks too, are what the library's own call checkpoints.

    Single ones are switched on with the library's flag where they have one, and wrapped where not.
    """
    whole = "nested" if config.version == 1 else "stages"
    if setting.checkpointing == "none":
        return
    if setting.checkpointing == whole:
        _enable_all(model)
    elif setting.checkpointing == "blocks":
        _enable([block for stage in stages for block in stage.blocks])
    else:
        _enable(chosen_stages(stages, setting.checkpointed_stages))


def _enable_all(model: Any) -> None:
    # The older name until transformers 5.20 or so; the newer one warns of nothing.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _enable(modules: list[nn.Module]) -> None:
    for module in modules:
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True  # type: ignore[assignment]
            module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
        else:
            checkpoint_in_place([module])
