"""A library's Swin for a setting that a test wrote by hand: resolved first, as a command does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.registry import find_library

if TYPE_CHECKING:
    from torch import nn

    from planner.libraries.spec import BuildOnShapes


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
