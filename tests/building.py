"""A small Swin, as many tests say it; and a library's Swin for a setting that a test wrote by hand:
resolved first, as a command does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.names import find_library

if TYPE_CHECKING:
    from torch import nn

    from planner.libraries.spec import BuildOnShapes

TINY_FIELDS: dict[str, Any] = {
    "image_size": 56, "depths": [2, 2], "num_heads": [1, 2], "embed_dim": 32, "num_classes": 10,
}  # fmt: skip
TINY = SwinConfig.model_validate(TINY_FIELDS)


def build_real(model: SwinConfig, setting: TrainSetting) -> nn.Module:
    """The library's own module, with the levers of `setting`."""
    import torch

    from planner.training.building import prepare, step_setting

    spec = find_library(model.library)
    resolved = spec.resolve(model, setting)
    as_float = resolved.model_copy(update={"precision": "fp32"})
    module, how = spec.build(model, resolved), step_setting(model, as_float)
    return prepare(module, how, torch.device("cpu"), to=lambda module, *_: module)


def on_shapes(model: SwinConfig, setting: TrainSetting) -> BuildOnShapes:
    """What builds it on shapes."""
    spec = find_library(model.library)
    return spec.on_shapes(model, spec.resolve(model, setting))
