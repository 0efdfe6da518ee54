"""What torchvision's Swin can do."""

from __future__ import annotations

from planner.libraries.room import (
    Attention,
    LibraryRoom,
    at_least_blocks,
    one_window,
    required,
)
from planner.libraries.torchvision.names import PUBLISHED
from planner.schema import SwinConfig


def _attentions(config: SwinConfig) -> tuple[Attention, ...]:
    return ("eager",)


def _faults(config: SwinConfig) -> list[str]:
    faults = [
        *required(
            config,
            in_channels=3,
            qkv_bias=True,
            patch_norm=True,
            absolute_position_embedding=False,
        ),
        *one_window(config),
    ]
    if any(config.pretrained_windows):
        faults.append("pretrained_window_size: torchvision has none")
    if sum(config.depths) == 1:
        faults.append("depths: torchvision cannot build a model of one block")
    if config.version == 2 and config.windows[0] == 1:
        faults.append("window_size: torchvision's version 2 divides by window_size - 1")
    return faults


ROOM = LibraryRoom(
    name="torchvision",
    title="torchvision",
    published=PUBLISHED,
    attentions=_attentions,
    checkpointings=at_least_blocks,
    faults=_faults,
)
