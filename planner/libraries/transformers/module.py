"""transformers' own Swin, built from a SwinConfig. Needs torch and transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.checkpointing import checkpoint_in_place
from planner.libraries.maps import chosen_stages
from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.transformers.arguments import config_arguments


def build(config: SwinConfig, setting: TrainSetting) -> nn.Module:
    """`SwinForImageClassification` or `Swinv2ForImageClassification`, of random weights.

    `drop_rate` is `hidden_dropout_prob`, `num_classes` is `num_labels`.
    Blocks and stages are wrapped: the library's own switch checkpoints both, one in the other.
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
    if setting.checkpointing == "blocks":
        checkpoint_in_place(block for stage in stages for block in stage.blocks)
    elif setting.checkpointing != "none":
        checkpoint_in_place(chosen_stages(stages, setting))
    built: nn.Module = model
    return built
