"""Optimizers on shapes: a file for each, and one line here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from planner.core.errors import UnsupportedError
from planner.core.schema import TrainSetting
from planner.step.optimizers.adafactor import Adafactor
from planner.step.optimizers.adam import Adam
from planner.step.optimizers.adamw_8bit import AdamW8bit
from planner.step.optimizers.base import Optimizer
from planner.step.optimizers.clipping import clip_gradients
from planner.step.optimizers.lion import Lion
from planner.step.optimizers.nadam import NAdam
from planner.step.optimizers.offloaded import Offloaded
from planner.step.optimizers.radam import RAdam
from planner.step.optimizers.rmsprop import RMSprop
from planner.step.optimizers.sgd import SGD
from planner.step.tensor import Device, Parameter

__all__ = ["Optimizer", "clip_gradients", "make_optimizer"]

FAMILIES: dict[str, type[Optimizer]] = {
    "adamw": Adam, "adam": Adam, "sgd": SGD, "adafactor": Adafactor, "lion": Lion,
    "rmsprop": RMSprop, "nadam": NAdam, "radam": RAdam,
}  # fmt: skip


def make_optimizer(
    device: Device, parameters: Sequence[Parameter], setting: TrainSetting
) -> Optimizer:
    """The optimizer of `setting`. Raises UnsupportedError for one that is not modelled."""
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
    family = FAMILIES.get(setting.optimizer_family)
    if family is None:
        raise UnsupportedError(
            f"the optimizer {setting.optimizer!r} is not modelled on shapes.",
            f"Use one of {', '.join(FAMILIES)}, or pass --record.",
        )
    return family(device, parameters, setting)
