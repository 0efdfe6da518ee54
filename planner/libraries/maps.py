"""What follows from a Swin's configuration: feature maps, windows, the plan of each block; and from
a setting, which stages it checkpoints and which weights it trains. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.core.schema import SwinConfig, TrainSetting

Pair = tuple[int, int]

CPB_HIDDEN = 512  # channels in version 2's MLP of the position bias, in every library


def feature_maps(config: SwinConfig) -> list[tuple[int, int]]:
    """(height, width) of each stage's feature map in tokens. Halves of odd sides are rounded up."""
    height, width = (side // config.patch_size for side in config.image_size)
    maps = []
    for _ in config.depths:
        maps.append((height, width))
        height, width = (height + 1) // 2, (width + 1) // 2
    return maps


def clamped_window(resolution: Pair, window: int, shifted: bool) -> tuple[Pair, Pair]:
    """(window, shift) of a block. A side that the window covers has no shift."""
    sides = [min(side, window) for side in resolution]
    shifts = [
        window // 2 if shifted and side > clamped else 0
        for side, clamped in zip(resolution, sides, strict=True)
    ]
    return (sides[0], sides[1]), (shifts[0], shifts[1])


def padding(side: int, window: int) -> int:
    """The tokens to add so that the window divides the side."""
    return -side % window


@dataclass(frozen=True)
class BlockPlan:
    """The sizes of a block that differ within a model.

    `channels`, `heads` and `window` (tokens per side, not clamped to the feature map) are those of
    its stage; `drop_path` is a probability.
    """

    channels: int
    hidden: int  # channels within the MLP
    heads: int
    window: int
    shifted: bool
    drop_path: float


def plan_blocks(config: SwinConfig, stage: int) -> list[BlockPlan]:
    """The plans of a stage's blocks, in order: every second block is shifted."""
    channels = config.stage_channels(stage)
    hidden = int(channels * config.mlp_ratio)
    heads, window = config.num_heads[stage], config.windows[stage]
    return [
        BlockPlan(channels, hidden, heads, window, index % 2 == 1, rate)
        for index, rate in enumerate(config.drop_path_rates()[stage])
    ]


def select_stages(stages: Sequence[Any], setting: TrainSetting) -> list[Any]:
    """The stages of a model, real or on shapes, that `setting.checkpointing` (stages, stages:0,1)
    names."""
    numbers = setting.checkpointed_stages
    return list(stages) if numbers is None else [stages[number] for number in numbers]


# Which weights of a model are trained: frozen first stages, and low-rank adapters (LoRA).
#
# They are patterns of the names in the real module, which are the same on shapes: `levers.py`
# applies them to a real module, `shared.py` on shapes.

# The linear layers of attention and of the MLP, in every library.
_ATTENTION, _MLP = r"attn\.(qkv|proj)", r"mlp\.fc[12]"
# The classifier is trained beside adapters, since its classes are those of the new task.
HEADS = ("head",)


def _stem_and_layers(num_stages: int) -> tuple[str, ...]:
    """The modules that freezing `num_stages` freezes: the embedding, `layers.N`."""
    if num_stages == 0:
        return ()
    stem = ("patch_embed", "absolute_pos_embed")
    return (*stem, *(f"layers.{stage}" for stage in range(num_stages)))


@dataclass(frozen=True)
class Trainable:
    """The weights that a setting trains, as patterns of names.

    `frozen` matches the beginnings of the names of the parameters that are not trained, before
    adapters are in place. `adapted` matches the whole names of the linear layers that get an
    adapter, as peft's `target_modules` does where it is a string; "" matches none.
    """

    frozen: str
    adapted: str
    lora_rank: int

    @classmethod
    def from_setting(cls, setting: TrainSetting) -> Trainable:
        frozen_stages = _prefix_pattern(_stem_and_layers(setting.frozen_stages))
        if not setting.lora_rank:
            return cls(frozen_stages, "", 0)
        layers = _ATTENTION if setting.lora_targets == "attention" else f"{_ATTENTION}|{_MLP}"
        outside = f"(?!{frozen_stages})" if setting.frozen_stages else ""
        adapted = rf"{outside}(.*\.)?({layers})"
        return cls(f"(?!{_prefix_pattern(HEADS)})", adapted, setting.lora_rank)

    def is_frozen(self, name: str) -> bool:
        """Whether the parameter called `name` (before adapters are in place) is not trained."""
        return re.match(self.frozen, name) is not None

    def is_adapted(self, name: str) -> bool:
        """Whether the linear layer called `name` gets an adapter: not in a frozen stage."""
        return re.fullmatch(self.adapted, name) is not None


def _prefix_pattern(modules: tuple[str, ...]) -> str:
    r"""The pattern of all names within `modules`: "(layers\.0|head)(\.|$)"."""
    return rf"({'|'.join(re.escape(module) for module in modules)})(\.|$)"
