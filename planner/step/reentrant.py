"""Activation checkpointing with re-entrance (torch/utils/checkpoint.py, CheckpointFunction).

What `torch.utils.checkpoint.checkpoint(function, x)` does when not told otherwise: forward records
nothing but x; backward runs the whole function again from a detached x, then a backward of its own
through what that recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.step.autocast import AutocastScope
from planner.step.autograd import Gradients, Node, begin, finish
from planner.step.engine import backward
from planner.step.tensor import GradientCell, Parameter, Tensor


class _Leaf(Parameter):
    """The detached x: the same storage, and a gradient that goes no further."""

    __slots__ = ()

    def __init__(self, x: Tensor) -> None:
        Tensor.__init__(self, x.storage, x.shape, x.strides, x.dtype)
        self.requires_grad = True
        self.cell = GradientCell()


def checkpoint_reentrantly(function: Callable[..., Any], x: Tensor) -> Tensor:
    """`torch.utils.checkpoint.checkpoint(function, x, use_reentrant=True)`: saves x."""
    device = x.storage.device
    if device.checkpoint_region is not None:
        region: Tensor = device.checkpoint_region(function, (x,))
        return region
    dtype = device.autocast.dtype if device.autocast else None
    node = begin("CheckpointFunctionBackward", (x,), _checkpoint_backward, (x,), (function, dtype))
    with device.no_grad():
        outputs: Tensor = function(x)
    return finish(outputs, node)


def _checkpoint_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """The casts of weights made in the recomputation live until its autocast ends."""
    function, dtype = node.data
    tensor = node.unpack(0)
    device = tensor.storage.device
    detached = _Leaf(tensor)
    grad_enabled, device.grad_enabled = device.grad_enabled, True
    with AutocastScope(device, dtype):
        outputs = function(detached)
    device.grad_enabled = grad_enabled
    gradient = grads[0]
    assert gradient is not None
    backward(outputs, gradient)
    return (detached.cell.grad,)
