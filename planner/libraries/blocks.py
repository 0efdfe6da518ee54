"""What several libraries' Swins share on shapes."""

from __future__ import annotations

from planner.step.nn import GELU, Dropout, Linear, Module
from planner.step.tensor import Device, Tensor
from planner.step.views import alias, slice_

Pair = tuple[int, int]


class Mlp(Module):
    """fc1, GELU, dropout, fc2, dropout (timm's Mlp, the original's)."""

    def __init__(self, device: Device, dim: int, hidden: int, drop_rate: float) -> None:
        self.fc1 = Linear(device, dim, hidden)
        self.act = GELU()
        self.drop1 = Dropout(drop_rate)
        self.fc2 = Linear(device, hidden, dim)
        self.drop2 = Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.fc2(x)
        x = self.drop2(x)
        return x


def clamped_window(resolution: Pair, window: int, shifted: bool) -> tuple[Pair, Pair]:
    """(window, shift) of a block: a side that the window covers has no shift."""
    sides = [min(side, window) for side in resolution]
    shifts = [
        window // 2 if shifted and side > clamped else 0
        for side, clamped in zip(resolution, sides, strict=True)
    ]
    return (sides[0], sides[1]), (shifts[0], shifts[1])


def padding(side: int, window: int) -> int:
    """Tokens to add so that the window divides the side."""
    return -side % window


def crop(x: Tensor, height: int, width: int) -> Tensor:
    """`x[:, :height, :width, :]` of a BHWC tensor; an alias where nothing is cut."""
    if (height, width) == x.shape[1:3]:
        return alias(x)
    if height != x.shape[1]:
        x = slice_(x, 1, 0, height)
    if width != x.shape[2]:
        x = slice_(x, 2, 0, width)
    return x
