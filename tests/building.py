"""A library's Swin for a setting that a test wrote by hand: resolved first, as a command does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.registry import find_library

if TYPE_CHECKING:
    from torch import nn

    from planner.libraries.spec import BuildOnShapes


def build_real(model: SwinConfig, setting: TrainSetting) -> nn.Module:
    """The library's own module."""
    spec = find_library(model.library)
    return spec.build(model, spec.resolve(model, setting))


def on_shapes(model: SwinConfig, setting: TrainSetting) -> BuildOnShapes:
    """What builds it on shapes."""
    spec = find_library(model.library)
    return spec.on_shapes(model, spec.resolve(model, setting))
