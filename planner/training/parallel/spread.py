"""What a module spread over ranks offers a training step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be sharded (by ZeRO-3 as `ds_tensor`)."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    part: Tensor = getattr(tensor, "ds_tensor", tensor)
    return part


class Spread(Protocol):
    """`module` is what is called in the place of the module that was spread."""

    @property
    def module(self) -> nn.Module: ...

    def micro_batch(self, sums_gradients: bool) -> AbstractContextManager[object]:
        """Around forward and backward of one micro-batch, after which gradients are summed over
        the ranks, or are not yet."""


class Engine(ABC):
    """A spread that runs backward, clips, scales and updates the weights by itself.

    Not a protocol: asking an object whether it has all of one would read its `scaler`.
    """

    module: nn.Module

    @abstractmethod
    def begin(self, optimizer: Optimizer) -> nn.Module:
        """Take `optimizer` over; what is called in the place of the module from then on."""

    @property
    @abstractmethod
    def scaler(self) -> torch.amp.GradScaler | None: ...

    @abstractmethod
    def micro_batch(self, sums_gradients: bool) -> AbstractContextManager[object]: ...

    @abstractmethod
    def backward(self, loss: Tensor) -> None: ...

    @abstractmethod
    def step(self) -> None:
        """Update the weights, and let go of the gradients."""
