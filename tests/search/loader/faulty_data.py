"""Datasets of a user's, each of its own kind, and some wrong. Items are small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

SIDE = 8
LENGTH = 64


def item() -> tuple[Tensor, int]:
    return torch.zeros(3, SIDE, SIDE), 0


class Good(Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return item()


class Raising(Good):
    def __getitem__(self, index: int) -> Any:
        raise KeyError(f"no caption for {index}")


class RaisingOnce(Good):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise KeyError("no caption")
        return item()


class OddShape(Good):
    def __getitem__(self, index: int) -> Any:
        return (torch.zeros(3, SIDE - 1, SIDE), 0) if index == 9 else item()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(10):
            yield item()


class Empty(Good):
    def __len__(self) -> int:
        return 0


def loader() -> DataLoader[Any]:
    return DataLoader(Good(), collate_fn=lambda items: torch.stack([i[0] for i in items]))


def no_dataset() -> int:
    return 3


def failing() -> Dataset[Any]:
    raise FileNotFoundError("/data/captions.json")
