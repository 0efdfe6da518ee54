"""Optimizers on shapes: a file for each, and one line here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from planner.core.schema import TrainSetting
from planner.step.optimizers.adam import Adam
from planner.step.optimizers.adamw_8bit import AdamW8bit
from planner.step.optimizers.base import Optimizer
from planner.step.optimizers.clipping import clip_gradients
from planner.step.optimizers.lion import Lion
from planner.step.optimizers.offloaded import Offloaded
from planner.step.optimizers.sgd import SGD
from planner.step.tensor import Device, Parameter

__all__ = ["Optimizer", "clip_gradients", "make_optimizer"]

# All others are recorded.
FAMILIES: dict[str, type[Optimizer]] = {
    "adamw": Adam, "adam": Adam, "sgd": SGD, "lion": Lion,
}  # fmt: skip


def make_optimizer(
    device: Device, parameters: Sequence[Parameter], setting: TrainSetting
) -> Optimizer:
    """The optimizer of `setting`, of a family in `FAMILIES`."""
    setting.check_optimizer()
    make = partial(_make_on_device, device, setting)
    if setting.offload_optimizer != "none":
        return Offloaded(device, parameters, setting, make)
    return make(parameters)


def _make_on_device(
    device: Device, setting: TrainSetting, parameters: Sequence[Parameter]
) -> Optimizer:
    if setting.optimizer_implementation == "8bit":
        return AdamW8bit(device, parameters, setting)
    return FAMILIES[setting.optimizer_family](device, parameters, setting)
