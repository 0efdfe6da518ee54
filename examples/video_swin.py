"""Video Swin as a task: clips to classes.

    planner estimate video_swin:VideoSwin --batch-size 4 --gpu "RTX 3090"
    planner estimate video_swin:VideoSwin --max-batch --gpu "RTX 3090"
    planner tune video_swin:VideoSwin --output tuned
    planner emit tuned --for pytorch --output train.py

Run them in this folder. A task is any object with these three methods. (`torchvision:swin3d_t` is
known by its name, too; this is how you would say a model of your own.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Clips = tuple[Tensor, Tensor]


class VideoSwin:
    """torchvision's Swin3D-T on clips of Kinetics-400."""

    unit = "clips"
    num_frames, image_px, num_classes = 16, 224, 400

    def module(self) -> nn.Module:
        from torchvision.models import get_model

        module: nn.Module = get_model("swin3d_t", num_classes=self.num_classes)
        return module

    def batch(self, size: int, device: torch.device) -> Clips:
        """Random clips [B, 3, T, H, W] and their classes [B]."""
        shape = (size, 3, self.num_frames, self.image_px, self.image_px)
        clips = torch.randn(shape, device=device)
        return clips, torch.randint(self.num_classes, (size,), device=device)

    def loss(self, module: nn.Module, batch: Clips) -> Tensor:
        clips, labels = batch
        return F.cross_entropy(module(clips), labels, label_smoothing=0.1)


class Tiny(VideoSwin):
    """The same on clips that a CPU trains in no time."""

    num_frames, image_px, num_classes = 4, 32, 5
