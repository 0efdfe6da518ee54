"""Small models for the warm process, which imports them by name; most of them break."""

import os
import signal
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

NUM_CLASSES = 16


class Network(nn.Module):
    """A convolution, a batch norm and a head; `change` takes the features in between."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda features: features) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.BatchNorm2d(32), nn.GELU())
        self.head = nn.Linear(32, NUM_CLASSES)
        self.change = change

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.change(self.stem(images).mean((2, 3))))


class OfOneValue(Network):
    """Its batch norm gets one value of each channel, of a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.BatchNorm1d(32)


class Adversarial(Network):
    """Trains its critic by itself, as a GAN may."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(NUM_CLASSES, 1)
        self.adam = torch.optim.Adam(self.critic.parameters())

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        self.critic(logits.detach()).mean().backward()
        self.adam.step()
        self.adam.zero_grad()
        return logits


def _raise(features: Tensor) -> Tensor:
    raise ValueError("no such stage")


def _read(features: Tensor) -> Tensor:
    return features * features.sum().item()


def _select(features: Tensor) -> Tensor:
    return features + features[features > 0].sum()


def _fill_host(features: Tensor) -> Tensor:
    return features + torch.empty(1 << 50).sum().item()


def _die(features: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return features


convolutional = Network
raises, reads, selects, fills_host, dies = (
    partial(Network, change) for change in (_raise, _read, _select, _fill_host, _die)
)
