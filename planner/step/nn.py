"""Modules on shapes: parameters, submodules and calls with the lifetimes of `nn.Module`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.ledger.ledger import Allocated, Event, Tagged
from planner.step.autograd import record
from planner.step.matmul import conv2d, linear
from planner.step.normalization import layer_norm
from planner.step.pointwise import (
    as_strided_backward,
    dropout,
    gelu,
    mean,
    mul,
    new_empty,
    relu,
    relu_,
)
from planner.step.strides import Shape
from planner.step.tensor import Device, Parameter, Storage, Tensor, num_bytes
from planner.step.views import squeeze, unsqueeze


class Module:
    """A module on shapes. Calling it holds its arguments until it returns, as `nn.Module` does.

    `path` is its name in the model (`layers.2.blocks.0.attn`), set by `name_modules`.
    """

    path = ""
    is_block = False  # one of those that a model repeats

    def __call__(self, *args: Any) -> Any:
        device = _device_of(args)
        outer, device.scope = device.scope, self.path
        result = self.forward(*args)
        device.scope = outer
        return result

    def forward(self, *args: Any) -> Any:
        raise AssertionError(f"{type(self).__name__} has no forward")

    def children(self) -> Iterator[tuple[str, Module]]:
        """(name, module) of the direct submodules, lists of modules flattened with their index."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                for index, entry in enumerate(value):
                    if isinstance(entry, Module):
                        yield f"{name}.{index}", entry

    def descendants(self) -> Iterator[Module]:
        """This module and all within it, as `nn.Module.modules`."""
        yield self
        for _, child in self.children():
            yield from child.descendants()

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, a module's own before its submodules', as `nn.Module.parameters`."""
        for module in self.descendants():
            for value in vars(module).values():
                if isinstance(value, Parameter):
                    yield value


def name_modules(root: Module, path: str = "") -> None:
    """Gives every module its path."""
    root.path = path
    for name, child in root.children():
        name_modules(child, f"{path}.{name}" if path else name)


def move_in_order(root: Module, device: Device) -> None:
    """Puts what building `root` allocated into the order in which `module.to(device)` does: of each
    module that of its submodules first, then its own parameters and its own buffers."""
    groups: dict[int, list[Event]] = {}
    for event in device.events:
        assert isinstance(event, Allocated | Tagged), "building only allocates"
        groups.setdefault(event.storage, []).append(event)
    ordered = [groups.pop(n) for n in _moved(root) if n in groups]
    device.events[:] = [event for group in (*ordered, *groups.values()) for event in group]


def _moved(module: Module) -> Iterator[int]:
    for _, child in module.children():
        yield from _moved(child)
    own = [value for value in vars(module).values() if isinstance(value, Tensor)]
    for tensor in sorted(own, key=lambda value: not isinstance(value, Parameter)):
        yield tensor.storage.ident


def _device_of(args: tuple[Any, ...]) -> Device:
    device: Device = args[0].storage.device
    return device


class Sequential(Module):
    """`nn.Sequential`."""

    def __init__(self, *modules: Module) -> None:
        self.modules = list(modules)

    def children(self) -> Iterator[tuple[str, Module]]:
        for index, module in enumerate(self.modules):
            yield str(index), module

    def forward(self, x: Tensor) -> Any:
        for module in self.modules:
            x = module(x)
        return x


class Identity(Module):
    """`nn.Identity`."""

    def forward(self, x: Tensor) -> Any:
        return x


class Linear(Module):
    """`nn.Linear(in_features, out_features, bias)`."""

    def __init__(
        self, device: Device, in_features: int, out_features: int, bias: bool = True
    ) -> None:
        self.weight = Parameter(device, (out_features, in_features))
        self.bias = Parameter(device, (out_features,)) if bias else None

    def forward(self, x: Tensor) -> Any:
        return linear(x, self.weight, self.bias)


class LayerNorm(Module):
    """`nn.LayerNorm(channels)`."""

    def __init__(self, device: Device, channels: int) -> None:
        self.weight = Parameter(device, (channels,))
        self.bias = Parameter(device, (channels,))

    def forward(self, x: Tensor) -> Any:
        return layer_norm(x, self.weight, self.bias)


class Conv2d(Module):
    """`nn.Conv2d(in, out, kernel_size=k, stride=k)`: the patch embedding."""

    def __init__(self, device: Device, in_channels: int, out_channels: int, kernel: int) -> None:
        self.kernel = kernel
        self.weight = Parameter(device, (out_channels, in_channels, kernel, kernel))
        self.bias = Parameter(device, (out_channels,))

    def forward(self, x: Tensor) -> Any:
        return conv2d(x, self.weight, self.bias, self.kernel)


class GELU(Module):
    """`nn.GELU()`."""

    def forward(self, x: Tensor) -> Any:
        return gelu(x)


class ReLU(Module):
    """`nn.ReLU(inplace)`."""

    def __init__(self, in_place: bool = False) -> None:
        self.in_place = in_place

    def forward(self, x: Tensor) -> Any:
        return relu_(x) if self.in_place else relu(x)


class Dropout(Module):
    """`nn.Dropout(rate)` in training."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def forward(self, x: Tensor) -> Any:
        return dropout(x, self.rate)


class DropPath(Module):
    """Stochastic depth by image: a random [B, 1, …] of x's dtype, kept for backward."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def forward(self, x: Tensor) -> Any:
        if self.rate == 0.0 or not x.storage.device.training:
            return x
        random = new_empty(x, (x.shape[0], *(1,) * (len(x.shape) - 1)))
        return mul(x, random)


def buffer(device: Device, shape: Shape, dtype: str | None = None) -> Tensor:
    """A registered buffer: alive as long as its module, without a gradient."""
    dtype = dtype or device.float_dtype
    storage = Storage(device, num_bytes(shape, dtype), "buffer")
    storage.assign("buffers")
    return Tensor(storage, shape, device.dense_strides(shape), dtype)


# Adaptive average pooling to one element, as PyTorch composes it of a mean.


def adaptive_avg_pool2d(x: Tensor) -> Tensor:
    """`F.adaptive_avg_pool2d(x, 1)`: [B, C, H, W] to [B, C, 1, 1]; saves nothing.

    Of a channels-last x the result is made channels-last too, in place, which autograd records
    (aten/src/ATen/native/AdaptiveAveragePooling.cpp).
    """
    out = mean(x, (-1, -2), keepdim=True)
    if _is_channels_last(x.shape, x.strides):
        channels = x.shape[1]
        strides = (channels, 1, channels, channels)
        result = Tensor(out.storage, out.shape, strides, out.dtype)
        out = record(result, "AsStridedBackward0", (out,), as_strided_backward, out.shape)
    return out


def adaptive_avg_pool1d(x: Tensor) -> Tensor:
    """`F.adaptive_avg_pool1d(x, 1)`: [B, C, L] to [B, C, 1]."""
    output = adaptive_avg_pool2d(unsqueeze(x, -2))
    return squeeze(output, -2)


def _is_channels_last(shape: Shape, strides: Shape) -> bool:
    """`is_channels_last_strides_2d` (c10/core/MemoryFormat.h)."""
    least = 0
    if strides[1] == 0:
        return False
    for dim in (1, 3, 2, 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(shape[dim], 1)
    return True
