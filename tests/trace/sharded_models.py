"""A small model in blocks, and what a real rank of gloo allocates for it."""

from __future__ import annotations

from torch import Tensor, nn

from planner.core.schema import FactoryModel

IMAGES = FactoryModel(factory="tests:none", image_size=(16, 16), num_classes=10)
WIDTH, BLOCKS = 64, 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fc2(nn.functional.gelu(self.fc1(x)))
        return out


class Blocks(nn.Module):
    """Tokens of 4 x 4 patches through a few blocks; nothing but matrix products and GELU."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(48, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.reshape(-1, 16, 48))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.sum(1))
        return logits
