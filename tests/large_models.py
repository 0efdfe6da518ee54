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


def swin_unetr() -> Segmentation:
    """As in monai's tutorial, on volumes of 64 voxels a side."""
    return Segmentation(64, {"feature_size": 48})
