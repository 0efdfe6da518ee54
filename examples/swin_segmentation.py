"""UperNet with a Swin backbone as a task: images to a class for each pixel. Needs transformers.

    planner estimate swin_segmentation:Segmentation --batch-size 4 --gpu "RTX 3090"
    planner tune swin_segmentation:Segmentation --output tuned
    planner emit tuned --for pytorch --output train.py

Run them in this folder.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Segmentation:
    """Swin-T under UperNet, 512 pixels, the 150 classes of ADE20K; the model has its own loss."""

    unit = "images"
    image_px, num_classes, embed_dim, hidden = 512, 150, 96, 512

    def module(self) -> nn.Module:
        from transformers import SwinConfig, UperNetConfig, UperNetForSemanticSegmentation

        backbone = SwinConfig(
            image_size=self.image_px,
            embed_dim=self.embed_dim,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        )
        config = UperNetConfig(
            backbone_config=backbone,
            num_labels=self.num_classes,
            hidden_size=self.hidden,
            auxiliary_in_channels=self.embed_dim * 4,  # of the third stage
        )
        return UperNetForSemanticSegmentation(config)

    def batch(self, size: int, device: torch.device) -> dict[str, Tensor]:
        """Random images [B, 3, H, W] and a class of each pixel [B, H, W]."""
        side = self.image_px
        return {
            "pixel_values": torch.randn(size, 3, side, side, device=device),
            "labels": torch.randint(self.num_classes, (size, side, side), device=device),
        }

    def loss(self, module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = module(**batch).loss
        return loss


class Tiny(Segmentation):
    """The same, of a size that a CPU trains in no time."""

    image_px, num_classes, embed_dim, hidden = 64, 5, 12, 16
