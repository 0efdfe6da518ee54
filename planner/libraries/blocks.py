"""What several libraries' Swins are built of on shapes."""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.step.nn import GELU, Conv2d, Dropout, DropPath, Identity, LayerNorm, Linear, Module
from planner.step.tensor import Device, Tensor
from planner.step.views import cat, flatten, pad, permute, reshape, slice_, view


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


def drop_path_or_identity(rate: float) -> Module:
    """No module that does anything where the rate is 0."""
    return DropPath(rate) if rate > 0 else Identity()


class PatchEmbed(Module):
    """Images [B, in_channels, height, width] to patches [B, H, W, C]."""

    def __init__(self, device: Device, config: SwinConfig) -> None:
        self.proj = Conv2d(device, config.in_channels, config.embed_dim, config.patch_size)
        self.norm = LayerNorm(device, config.embed_dim) if config.patch_norm else Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        x = permute(x, 0, 2, 3, 1)
        x = self.norm(x)
        return x


def pad_to_even(x: Tensor) -> Tensor:
    """[B, H, W, C] with even sides; itself where they are."""
    _, height, width, _ = x.shape
    if height % 2 or width % 2:
        x = pad(x, height % 2, width % 2)
    return x


def four_parities(x: Tensor) -> list[Tensor]:
    """`x[:, row::2, col::2, :]` of a BHWC tensor, columns slowest: four of [B, H/2, W/2, C]."""
    _, height, width, _ = x.shape
    return [
        slice_(slice_(x, 1, row, height, 2), 2, col, width, 2)
        for col in range(2)
        for row in range(2)
    ]


def as_tokens(parities: list[Tensor]) -> Tensor:
    """Four of [B, H/2, W/2, C] to [B, L/4, 4C]."""
    x = cat(parities, -1)
    return view(x, x.shape[0], -1, x.shape[-1])


def four_side_by_side(x: Tensor) -> Tensor:
    """[B, H, W, C] to [B, H/2, W/2, 4C] in one copy, in the order of `four_parities`."""
    batch, height, width, channels = x.shape
    x = reshape(x, batch, height // 2, 2, width // 2, 2, channels)
    return flatten(permute(x, 0, 1, 3, 4, 2, 5), 3)


class Merging(Module):
    """Four patches to one, [.., 4C] to [.., 2C]: version 2 norms after the reduction."""

    def __init__(self, device: Device, channels: int, version: int) -> None:
        self.version = version
        self.reduction = Linear(device, 4 * channels, 2 * channels, bias=False)
        self.norm = LayerNorm(device, 4 * channels if version == 1 else 2 * channels)

    def reduce(self, x: Tensor) -> Tensor:
        x = self.norm(x) if self.version == 1 else self.reduction(x)
        x = self.reduction(x) if self.version == 1 else self.norm(x)
        return x
