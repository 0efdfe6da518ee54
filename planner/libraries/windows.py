"""Feature maps cut into windows on shapes, as several libraries' Swins do it.

B batch, H W feature map, C channels, nW windows an image, N tokens a window, h heads.
"""

from __future__ import annotations

from planner.libraries.maps import CPB_HIDDEN, Pair
from planner.step.nn import Linear, ReLU, Sequential, buffer
from planner.step.pointwise import add
from planner.step.tensor import Device, Tensor
from planner.step.views import alias, contiguous, permute, slice_, take_rows, unsqueeze, view


def crop(x: Tensor, height: int, width: int) -> Tensor:
    """`x[:, :height, :width, :]` of a BHWC tensor; an alias where nothing is cut."""
    if (height, width) == x.shape[1:3]:
        return alias(x)
    if height != x.shape[1]:
        x = slice_(x, 1, 0, height)
    if width != x.shape[2]:
        x = slice_(x, 2, 0, width)
    return x


def window_partition(x: Tensor, window: Pair) -> Tensor:
    """[B, H, W, C] to [B*nW, window, window, C]."""
    batch, height, width, channels = x.shape
    x = view(x, batch, height // window[0], window[0], width // window[1], window[1], channels)
    return view(contiguous(permute(x, 0, 1, 3, 2, 4, 5)), -1, window[0], window[1], channels)


def window_reverse(windows: Tensor, window: Pair, height: int, width: int) -> Tensor:
    """[B*nW, window, window, C] to [B, H, W, C]."""
    channels = windows.shape[-1]
    x = view(windows, -1, height // window[0], width // window[1], window[0], window[1], channels)
    return view(contiguous(permute(x, 0, 1, 3, 2, 4, 5)), -1, height, width, channels)


def spread_bias(table: Tensor, index: Tensor, area: int) -> Tensor:
    """A table's rows [.., h] for every pair of a window's tokens: [h, N, N]."""
    bias = view(take_rows(table, view(index, -1)), area, area, -1)
    bias = contiguous(permute(bias, 2, 0, 1))
    return bias


def position_bias_mlp(device: Device, heads: int) -> Sequential:
    """Version 2's way from a pair's offset to its bias for each head."""
    return Sequential(
        Linear(device, 2, CPB_HIDDEN),
        ReLU(in_place=True),
        Linear(device, CPB_HIDDEN, heads, bias=False),
    )


def shift_mask(device: Device, resolution: Pair, window: Pair) -> Tensor:
    """The buffer of a shifted block: [nW, N, N]."""
    rows, columns = (-(-side // cut) for side, cut in zip(resolution, window, strict=True))
    area = window[0] * window[1]
    return buffer(device, (rows * columns, area, area))


def add_shift_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """[B*nW, h, N, N], and [nW, N, N] added to the windows of every image."""
    _, heads, area, _ = scores.shape
    by_image = view(scores, -1, mask.shape[0], heads, area, area)
    return view(add(by_image, unsqueeze(unsqueeze(mask, 1), 0)), -1, heads, area, area)
