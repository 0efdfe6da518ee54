"""A folder of tiny JPEGs, models that take them, and data sets with faults: for feeding tests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

SIDE = 16  # of tests.search.factories.Tiny's images
CLASSES = 10
# Of processor time, that an image of `Burning` takes to load, and one of `Working` to step.
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


def burn(seconds: float) -> None:
    """Takes so much processor time, however long that lasts."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Own(Dataset[Any]):
    """Images for `Tiny`, each of which takes `seconds` and does what `act` says."""

    def __init__(self, seconds: float = 0.0, act: str = "") -> None:
        self.seconds, self.act = seconds, act

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        if self.act == "hang":
            time.sleep(10_000)
        if self.act == "raise":
            raise ValueError("the label is missing")
        side = SIDE + 1 if self.act == "shape" else SIDE
        label = CLASSES if self.act == "label" else index % CLASSES
        return torch.zeros(3, side, side), label


class Burning(Own):
    """Images that take processor time to load."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        burn(LOAD_SECONDS)
        return super().__getitem__(index)


def burning() -> Burning:
    return Burning()


def own() -> Own:
    return Own()


def slow() -> Own:
    return Own(seconds=0.02)


def raising() -> Own:
    return Own(act="raise")


def hanging() -> Own:
    return Own(act="hang")


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


class Sleeping(nn.Module):
    """Images to logits, in a time that is known and takes no processor."""

    def __init__(self, image_seconds: float) -> None:
        super().__init__()
        torch.set_num_threads(1)  # two would wait for each other on a busy machine
        self.image_seconds = image_seconds
        self.head = nn.Linear(3, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(self.image_seconds * len(images))
        logits: torch.Tensor = self.head(images.mean((2, 3)))
        return logits


class Working(Sleeping):
    """Images to logits, in processor time that is known."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        burn(STEP_SECONDS * len(images))
        return super().forward(images)


def working() -> nn.Module:
    return Working(0.0)


def quick() -> nn.Module:
    return Sleeping(0.005)


def steady() -> nn.Module:
    return Sleeping(0.025)


class Vectors(Dataset[Any]):
    """What `Task` takes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4)


def vectors() -> Vectors:
    return Vectors()
