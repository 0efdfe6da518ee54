"""Datasets of a user's, each wrong in its own way. Items are small: the fault is what is probed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from search.loader import usage

SIDE = 8
LENGTH = 64


def item() -> tuple[Tensor, int]:
    return torch.zeros(3, SIDE, SIDE), 0


class Good(Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return item()


class Sleeping(Good):
    """What an item takes is known: `SECONDS`."""

    SECONDS = 0.01

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.SECONDS)
        return item()


class Hanging(Good):
    def __getitem__(self, index: int) -> Any:
        if index == 17 and get_worker_info() is not None:
            time.sleep(10_000)
        return item()


class HangingDeaf(Good):
    """Holds the interpreter: no thread of Python's runs any more."""

    def __getitem__(self, index: int) -> Any:
        import ctypes

        ctypes.PyDLL(None).sleep(10_000)
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


class Doubles(Good):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, SIDE, SIDE, dtype=torch.float64), 0


class Large(Good):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 256, 256), 0


class Leaking(Good):
    kept: list[bytes]

    def __init__(self) -> None:
        self.kept = []
        usage.MEMORY_SECONDS = 0.1  # its growth is looked at more often

    def __getitem__(self, index: int) -> Any:
        self.kept.append(os.urandom(1 << 19))
        time.sleep(0.005)
        return item()


class Dying(Good):
    """A worker ends by a signal; the main process, which loads the stages' sample, does not.

    It ends at its tenth item: torch listens for the end of workers once it has started them all,
    and notices what ended before when it has waited for 5 s."""

    NUMBER = signal.SIGKILL
    loaded = 0

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            time.sleep(0.01)
            self.loaded += 1
            if self.loaded == 10:
                os.kill(os.getpid(), self.NUMBER)
        return item()


class DyingByBus(Dying):
    NUMBER = signal.SIGBUS


class LeavingProcesses(Good):
    def __getitem__(self, index: int) -> Any:
        if index == 0:
            subprocess.Popen(["sleep", "10000"], start_new_session=True)
        return item()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(10):
            yield item()


class EmptyStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class InBatches(Good):
    """Loads the items of a batch at once, as tables of `datasets` do."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [item() for _ in indices]


class Empty(Good):
    def __len__(self) -> int:
        return 0


class Negative(Good):
    def __len__(self) -> int:
        return -5


class Texts(Good):
    def __getitem__(self, index: int) -> Any:
        return f"item {index}"


def loader() -> DataLoader[Any]:
    return DataLoader(Good(), collate_fn=lambda items: torch.stack([i[0] for i in items]))


def no_dataset() -> int:
    return 3


def failing() -> Dataset[Any]:
    raise FileNotFoundError("/data/captions.json")
