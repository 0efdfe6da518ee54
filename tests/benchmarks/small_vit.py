"""A small vision transformer of plain torch modules: a factory's model, for a CPU to train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIDE, PATCH, WIDTH, CLASSES = 64, 8, 192, 10


class SmallViT(nn.Module):
    """64 patches of an image [B, 3, 64, 64], four blocks, the mean of the tokens to 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.position = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(_block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.head(self.blocks(tokens).mean(1))
        return logits


def _block() -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, 3, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


def build() -> SmallViT:
    return SmallViT()
