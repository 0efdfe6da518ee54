"""A folder of tiny JPEGs, models that take them, and data sets with faults: for feeding tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

SIDE = 16  # of tests.search.factories.Tiny's images
CLASSES = 10
LOAD_SECONDS, STEP_SECONDS = 0.010, 0.020


def make_folder(root: Path, classes: int = 2, each: int = 8, side: int = 24) -> Path:
    """`root/train/CLASS/N.jpg`."""
    for number in range(classes):
        folder = root / "train" / f"class{number}"
        folder.mkdir(parents=True)
        for index in range(each):
            image = Image.new("RGB", (side, side), (number * 20 % 256, index * 30 % 256, 90))
            image.save(folder / f"{index}.jpg", quality=80)
    return root


class Own(Dataset[Any]):
    """Images for `Tiny`, of which `act` says what is wrong."""

    def __init__(self, act: str = "") -> None:
        self.act = act

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.act == "raise":
            raise ValueError("the label is missing")
        side = SIDE + 1 if self.act == "shape" else SIDE
        label = CLASSES if self.act == "label" else index % CLASSES
        return torch.zeros(3, side, side), label


def own() -> Own:
    return Own()


def raising() -> Own:
    return Own(act="raise")


def misshapen() -> Own:
    return Own(act="shape")


def mislabelled() -> Own:
    return Own(act="label")


class Task:
    """A task with batches of its own: vectors and no labels."""

    def module(self) -> nn.Module:
        return nn.Linear(4, 1)

    def batch(self, size: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, 4, device=device)

    def loss(self, module: Any, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(batch).mean()
        return loss


def task() -> Task:
    return Task()


class Vectors(Dataset[Any]):
    """What `Task` takes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4)


def vectors() -> Vectors:
    return Vectors()
