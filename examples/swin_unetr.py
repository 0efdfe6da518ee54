"""Swin UNETR as a task by example: volumes to a class for each voxel. Needs monai.

    planner estimate swin_unetr:build --batch-size 1 --gpu "RTX 3090"
    planner tune swin_unetr:build --output tuned
    planner emit tuned --for pytorch --output train.py

Run them in this folder. A factory may return (module, one real batch, loss): the batch is made any
size by repeating or cutting its items.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_ORGANS = 14  # of BTCV, with the background
Parts = tuple[nn.Module, dict[str, Tensor], Any]


def build(feature_size: int = 48, side: int = 96) -> Parts:
    """The model of arXiv 2201.01266 on crops of 96³ voxels, as in its training on BTCV."""
    from monai.networks.nets import SwinUNETR

    module = SwinUNETR(in_channels=1, out_channels=NUM_ORGANS, feature_size=feature_size)
    return module, example(side), loss


def tiny() -> Parts:
    """The same, of a size that a CPU trains in no time."""
    return build(feature_size=12, side=64)


def example(side: int) -> dict[str, Tensor]:
    """A batch as a loader of yours yields it: here two crops of noise."""
    volumes = torch.randn(2, 1, side, side, side)
    return {"image": volumes, "label": torch.randint(NUM_ORGANS, (2, side, side, side))}


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of each voxel; monai's DiceCELoss stands here as well."""
    return F.cross_entropy(module(batch["image"]), batch["label"])
