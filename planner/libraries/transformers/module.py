"""transformers' own Swin, built from a SwinConfig. Needs torch and transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.checkpointing import checkpoint_in_place
from planner.libraries.maps import chosen_stages
from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.transformers.arguments import config_arguments


def build(config: SwinConfig, setting: TrainSetting) -> nn.Module:
    """`SwinForImageClassification` or `Swinv2ForImageClassification`, of random weights.

    `drop_rate` is `hidden_dropout_prob`, `num_classes` is `num_labels`.
    """
    # transformers imports torchvision where it finds it.
    declare_missing_operators()
    from transformers import SwinConfig as Swinv1Config
    from transformers import SwinForImageClassification, Swinv2Config, Swinv2ForImageClassification

    arguments = config_arguments(config)
    model: Any
    if config.version == 1:
        own = Swinv1Config(**arguments, attn_implementation=setting.attention)
        model = SwinForImageClassification(own)
        stages = model.swin.encoder.layers
    else:
        own = Swinv2Config(**arguments)
        model = Swinv2ForImageClassification(own)
        stages = model.swinv2.encoder.layers
    _checkpoint(model, stages, config, setting)
    built: nn.Module = model
    return built


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
        _enable(chosen_stages(stages, setting))


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
