"""Frozen weights and low-rank adapters on shapes: what `levers.py` does to a real module."""

from __future__ import annotations

from collections.abc import Iterator

from planner.libraries.trainable import Trainable
from planner.step.matmul import linear
from planner.step.nn import Linear, Module
from planner.step.pointwise import add, scale
from planner.step.tensor import Device, Parameter, Tensor


class LoraLinear(Module):
    """A linear layer plus a product of rank r, as in `levers.py`."""

    def __init__(self, device: Device, base: Linear, rank: int) -> None:
        out_features, in_features = base.weight.shape
        self.lora_a = Parameter(device, (rank, in_features))
        self.lora_b = Parameter(device, (out_features, rank))
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return add(y, scale(linear(linear(x, self.lora_a), self.lora_b)))


def choose_trainable(device: Device, module: Module, trainable: Trainable) -> None:
    """Freezes what is not trained and puts the adapters in, all in place."""
    for name, parameter in named_parameters(module):
        if trainable.is_frozen(name):
            parameter.requires_grad = False
    for parent, name, attribute in list(_attributes(module)):
        child = vars(parent)[attribute]
        if isinstance(child, Linear) and trainable.is_adapted(name):
            setattr(parent, attribute, LoraLinear(device, child, trainable.lora_rank))


def named_parameters(module: Module, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
    """All parameters with the names that they have in the real module."""
    for name, value in vars(module).items():
        if isinstance(value, Parameter):
            yield prefix + name, value
    for name, child in module.children():
        yield from named_parameters(child, f"{prefix}{name}.")


def _attributes(module: Module, prefix: str = "") -> Iterator[tuple[Module, str, str]]:
    """(module, name in the model, attribute) of everything that is a plain attribute of one."""
    for attribute in vars(module):
        yield module, prefix + attribute, attribute
    for name, child in module.children():
        yield from _attributes(child, f"{prefix}{name}.")
