"""Adaptive average pooling to one element, as PyTorch composes it of a mean."""

from __future__ import annotations

from planner.step.autograd import record
from planner.step.pointwise import as_strided_backward, mean
from planner.step.strides import Shape
from planner.step.tensor import Tensor
from planner.step.views import squeeze, unsqueeze


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
