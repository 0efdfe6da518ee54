"""Writing into a part of a tensor that needs a gradient."""

from __future__ import annotations

from planner.step.autograd import Gradients, Node, only_gradient, pointwise_cost, record
from planner.step.pointwise import clone, unary
from planner.step.tensor import Tensor, empty
from planner.step.views import slice_


def zero_part_(x: Tensor, start: int, stop: int) -> Tensor:
    """`x[start:stop].zero_()` of a vector: x's own storage under a new node (`CopySlices`)."""
    x.storage.device.compute("aten.zero_", "pointwise", x.dtype, 0, (stop - start) * 4)
    result = Tensor(x.storage, x.shape, x.strides, x.dtype)
    return record(result, "CopySlices", (x,), _copy_slices_backward, (start, stop))


def _copy_slices_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """torch/csrc/autograd/functions/tensor.cpp: a copy of the whole, a clone of the part, zeros in
    its place (`ZeroBackward`), copied back."""
    grad = only_gradient(grads)
    device = grad.storage.device
    whole = empty(device, grad.shape, grad.dtype, "aten.new_empty_strided", grad.strides)
    pointwise_cost(device, "aten.copy_", whole, 1)
    part = slice_(whole, 0, *node.data)
    to_part = unary(clone(part), "aten.zeros_like")
    pointwise_cost(device, "aten.copy_", to_part, 1)
    return (whole,)
