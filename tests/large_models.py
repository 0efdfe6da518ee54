"""Tasks that are not images to logits, small and as people train them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.libraries.missing_operators import declare_missing_operators

CLASSES = 14  # organs of BTCV, on which Swin UNETR was trained


@dataclass(frozen=True)
class Segmentation:
    """monai's SwinUNETR: volumes [B, 1, S, S, S] to a class for each voxel."""

    side: int
    arguments: dict[str, Any]

    def module(self) -> nn.Module:
        declare_missing_operators()
        from monai.networks.nets import SwinUNETR

        module: nn.Module = SwinUNETR(in_channels=1, out_channels=CLASSES, **self.arguments)
        return module

    def batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        volume = (self.side,) * 3
        classes = torch.randint(CLASSES, (size, *volume), device=device)
        return torch.randn(size, 1, *volume, device=device), classes

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        volumes, classes = batch
        return F.cross_entropy(module(volumes), classes)


@dataclass(frozen=True)
class Clips:
    """torchvision's Video Swin: clips [B, 3, frames, S, S] to a class."""

    frames: int
    side: int

    def module(self) -> nn.Module:
        declare_missing_operators()
        from torchvision.models.video.swin_transformer import SwinTransformer3d

        return SwinTransformer3d([2, 4, 4], 12, [1, 1], [1, 2], [4, 4, 4], num_classes=CLASSES)

    def batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        clips = torch.randn(size, 3, self.frames, self.side, self.side, device=device)
        return clips, torch.randint(CLASSES, (size,), device=device)

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        clips, classes = batch
        return F.cross_entropy(module(clips), classes)


def swin_unetr() -> Segmentation:
    """As in monai's tutorial, on volumes of 64 voxels a side."""
    return Segmentation(64, {"feature_size": 48})


def small_swin_unetr() -> Segmentation:
    return Segmentation(64, {"feature_size": 12, "depths": (1, 1, 1, 1)})


def small_swin3d() -> Clips:
    return Clips(frames=8, side=32)
