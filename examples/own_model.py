"""Tune a model of your own: a factory that takes no arguments and returns a module.

The module maps images [B, channels, height, width] to logits [B, classes]. On the command line it
is `planner tune own_model:build`. Run: python own_model.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

import search
from planner.core.schema import FactoryModel

CHANNELS, CLASSES, IMAGE = 32, 10, 64


def build() -> nn.Module:
    """A small convolutional classifier."""
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, kernel_size=4, stride=4),
        nn.GELU(),
        nn.Conv2d(CHANNELS, CHANNELS, kernel_size=3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(CHANNELS, CLASSES),
    )


def main(folder: Path) -> None:
    model = FactoryModel(
        factory="own_model:build", image_size=(IMAGE, IMAGE), num_classes=CLASSES
    )  # fmt: skip
    found = search.tune(
        model,
        device="cpu",
        batch_size=[8, 16],
        restrict={"precision": ["fp32"], "compile": ["off"]},
        trials=2,
        output=folder,
    )
    assert found.evidence is not None, found.advice
    batch_size = found.evidence.setting.batch_size
    print(f"{found.evidence.images_per_second:.0f} images/s at batch {batch_size}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tune-own-model"))
