"""Native's feature maps cut into windows, and back. Legend as in `module.py`. Needs torch."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.core.schema import SwinConfig
from planner.libraries.maps import Pair
from planner.libraries.native.layout import WindowLayout

PadOrder = Literal["before-shift", "after-shift"]

MASKED = -100.0  # added to the score of two tokens that are no neighbours, as in every Swin


class WindowGrid(WindowLayout, nn.Module):
    """How a stage's feature map is cut into windows, and what all its blocks share."""

    relative_position_index: Tensor  # [N * N]: for each pair, its row in the table of biases
    shift_mask: Tensor | None  # [nW, 1, N, N]: MASKED where a shifted window joins strangers
    relative_coordinates: Tensor | None  # version 2: [(2h - 1) * (2w - 1), 2], log-spaced

    def __init__(
        self, config: SwinConfig, stage: int, feature_map: Pair, pad_order: PadOrder
    ) -> None:
        super().__init__()
        self.lay_out(feature_map, config.windows[stage])
        self.pad_first = pad_order == "before-shift"

        index = relative_position_index(self.window)
        self.register_buffer("relative_position_index", index, persistent=False)
        mask = shift_mask(self.counts, self.window, self.shift) if self.has_shift else None
        self.register_buffer("shift_mask", mask, persistent=False)
        coordinates = None
        if config.version == 2:
            coordinates = relative_coordinates(self.window, config.pretrained_windows[stage])
        self.register_buffer("relative_coordinates", coordinates, persistent=False)

    def partition(self, x: Tensor, shifted: bool) -> Tensor:
        """[B, H, W, C] to windows [B * nW, N, 1, C], or, shifted, side by side: [B, N, nW, C]."""
        if self.pad_first:
            x = self.pad(x)
        if shifted:
            x = x.roll((-self.shift[0], -self.shift[1]), dims=(1, 2))
        if not self.pad_first:
            x = self.pad(x)
        batch, _, _, channels = x.shape
        (rows, columns), (height, width) = self.counts, self.window
        x = x.view(batch, rows, height, columns, width, channels)
        if shifted:
            x = x.permute(0, 2, 4, 1, 3, 5)
            return x.reshape(batch, self.num_tokens, self.num_windows, channels)
        x = x.permute(0, 1, 3, 2, 4, 5)
        return x.reshape(batch * self.num_windows, self.num_tokens, 1, channels)

    def merge(self, x: Tensor, shifted: bool) -> Tensor:
        """The way back from `partition`: [B, H, W, C]."""
        channels = x.shape[-1]
        (rows, columns), (height, width) = self.counts, self.window
        if shifted:
            x = x.view(-1, height, width, rows, columns, channels)
            x = x.permute(0, 3, 1, 4, 2, 5)
        else:
            x = x.view(-1, rows, columns, height, width, channels)
            x = x.permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(-1, rows * height, columns * width, channels)
        if not self.pad_first:
            x = self.crop(x)
        if shifted:
            x = x.roll(self.shift, dims=(1, 2))
        if self.pad_first:
            x = self.crop(x)
        return x

    def pad(self, x: Tensor) -> Tensor:
        if self.has_padding:
            x = F.pad(x, (0, 0, 0, self.padding[1], 0, self.padding[0]))
        return x

    def crop(self, x: Tensor) -> Tensor:
        if self.has_padding:
            x = x[:, : self.feature_map[0], : self.feature_map[1]].contiguous()
        return x


def relative_position_index(window: Pair) -> Tensor:
    """For each pair of a window's tokens, the row of their offset in the table of biases: [N * N].

    The table counts offsets (Δrow, Δcolumn) from (-(height - 1), -(width - 1)), row by row.
    """
    height, width = window
    rows = torch.arange(height).repeat_interleave(width)
    columns = torch.arange(width).repeat(height)
    row_offsets = rows[:, None] - rows[None, :] + height - 1
    column_offsets = columns[:, None] - columns[None, :] + width - 1
    return (row_offsets * (2 * width - 1) + column_offsets).flatten()


def relative_coordinates(window: Pair, pretrained_side: int) -> Tensor:
    """Version 2's log-spaced offsets, in the order of the bias table: [(2h - 1) * (2w - 1), 2].

    Δ is scaled so that the (pre-training) window's edge is 8, then sign(Δ) · log2(|Δ| + 1) / log2 8
    (arXiv 2111.09883, equation 4, with the authors' normalisation).
    """
    axes = []
    for side in window:
        edge = max((pretrained_side or side) - 1, 1)
        axes.append(torch.arange(1 - side, side, dtype=torch.float32) * (8.0 / edge))
    offsets = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    return offsets.sign() * torch.log2(offsets.abs() + 1.0) / math.log2(8.0)


def shift_mask(counts: Pair, window: Pair, shift: Pair) -> Tensor:
    """What a shifted feature map adds to the scores: 0 within a region, MASKED across: [nW,1,N,N].

    After the shift the last window of an axis holds two strips that were not neighbours.
    """
    regions = []
    for count, side, step in zip(counts, window, shift, strict=True):
        place = torch.arange(count * side)
        if step == 0:
            regions.append(torch.zeros_like(place))
        else:
            length = count * side
            regions.append((place >= length - side).long() + (place >= length - step).long())
    region = regions[0][:, None] * 3 + regions[1][None, :]
    region = region.view(counts[0], window[0], counts[1], window[1])
    region = region.permute(0, 2, 1, 3).reshape(counts[0] * counts[1], window[0] * window[1])
    strangers = region[:, :, None] != region[:, None, :]
    return (strangers.float() * MASKED).unsqueeze(1)
