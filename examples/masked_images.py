"""Masked-image pretraining (SimMIM) of a Swin, as a task by its collator. Needs transformers.

    planner estimate masked_images:build --batch-size 32 --gpu "RTX 3090"
    planner tune masked_images:build --output tuned
    planner emit tuned --for pytorch --output train.py

Run them in this folder. A model of transformers computes its own loss, so a collator that makes its
batches from a dataset is all that a task needs. With the default sizes, the name
`transformers:SwinForMaskedImageModeling` says the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.training.tasks import Task, from_collator

MASKED_SHARE = 0.6  # of the patches: arXiv 2111.09886 §4.1.2


def build(image_px: int = 192, **sizes: Any) -> Task:
    """Swin-T at 192 pixels with windows of 6, as SimMIM is trained."""
    from transformers import SwinConfig, SwinForMaskedImageModeling

    config = SwinConfig(image_size=image_px, **{"window_size": 6, **sizes})
    patches = (image_px // config.patch_size) ** 2

    def collate(images: list[Tensor]) -> dict[str, Tensor]:
        masked = torch.rand(len(images), patches) < MASKED_SHARE
        return {"pixel_values": torch.stack(images), "bool_masked_pos": masked}

    dataset = [torch.randn(3, image_px, image_px) for _ in range(4)]  # yours goes here
    return from_collator(SwinForMaskedImageModeling(config), collate, dataset)


def tiny() -> Task:
    """The same, of a size that a CPU trains in no time."""
    return build(64, embed_dim=12, depths=[2, 2], num_heads=[1, 2], encoder_stride=8)
