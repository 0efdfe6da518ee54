"""transformers' own Swin, built from a SwinConfig. Needs torch and transformers."""

from __future__ import annotations

from torch import nn

from planner.core.schema import SwinConfig
from planner.core.schema.setting import Attention
from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.transformers.arguments import config_arguments


def build(config: SwinConfig, attention: Attention) -> nn.Module:
    """`SwinForImageClassification` or `Swinv2ForImageClassification`, of random weights.

    `drop_rate` is `hidden_dropout_prob`, `num_classes` is `num_labels`.
    """
    # transformers imports torchvision where it finds it.
    declare_missing_operators()
    from transformers import SwinConfig as Swinv1Config
    from transformers import SwinForImageClassification, Swinv2Config, Swinv2ForImageClassification

    arguments = config_arguments(config)
    built: nn.Module
    if config.version == 1:
        own = Swinv1Config(**arguments, attn_implementation=attention)
        built = SwinForImageClassification(own)
    else:
        built = Swinv2ForImageClassification(Swinv2Config(**arguments))
    return built
