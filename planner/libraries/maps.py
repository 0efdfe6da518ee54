"""What follows from a Swin's configuration: feature maps, windows, what blocks are built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.core.schema import SwinConfig, TrainSetting

Pair = tuple[int, int]

CPB_HIDDEN = 512  # channels in version 2's MLP of the position bias, in every library


def feature_maps(config: SwinConfig) -> list[tuple[int, int]]:
    """(height, width) of each stage's feature map in tokens, odd sides rounded up on halving."""
    height, width = (side // config.patch_size for side in config.image_size)
    maps = []
    for _ in config.depths:
        maps.append((height, width))
        height, width = (height + 1) // 2, (width + 1) // 2
    return maps


def clamped_window(resolution: Pair, window: int, shifted: bool) -> tuple[Pair, Pair]:
    """(window, shift) of a block: a side that the window covers has no shift."""
    sides = [min(side, window) for side in resolution]
    shifts = [
        window // 2 if shifted and side > clamped else 0
        for side, clamped in zip(resolution, sides, strict=True)
    ]
    return (sides[0], sides[1]), (shifts[0], shifts[1])


def padding(side: int, window: int) -> int:
    """Tokens to add so that the window divides the side."""
    return -side % window


@dataclass(frozen=True)
class BlockPlan:
    """What a block is built from that is not the same for the whole model.

    `channels`, `heads` and `window` (tokens a side, not clamped to the feature map) are its
    stage's; `drop_path` is a probability.
    """

    channels: int
    hidden: int  # channels within the MLP
    heads: int
    window: int
    shifted: bool
    drop_path: float


def plan_blocks(config: SwinConfig, stage: int) -> list[BlockPlan]:
    """The blocks of a stage in order: every second one is shifted."""
    channels = config.stage_channels(stage)
    hidden = int(channels * config.mlp_ratio)
    heads, window = config.num_heads[stage], config.windows[stage]
    return [
        BlockPlan(channels, hidden, heads, window, index % 2 == 1, rate)
        for index, rate in enumerate(config.drop_path_rates()[stage])
    ]


def chosen_stages(stages: Sequence[Any], setting: TrainSetting) -> list[Any]:
    """Those of a model's stages, real or on shapes, that `setting.checkpointing` (stages,
    stages:0,1) names."""
    numbers = setting.checkpointed_stages
    return list(stages) if numbers is None else [stages[number] for number in numbers]
