"""What torchvision's Swin can do."""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.spec import LibrarySpec, one_window, only_eager, required
from planner.libraries.torchvision.names import PUBLISHED


def _faults(config: SwinConfig) -> list[str]:
    faults = [
        *required(
            config, in_channels=3, qkv_bias=True, patch_norm=True, absolute_position_embedding=False
        ),
        *one_window(config),
    ]
    if any(config.pretrained_windows):
        faults.append("pretrained_window_size: torchvision has no such option")
    if sum(config.depths) == 1:
        faults.append("depths: torchvision cannot build a model of one block")
    if config.version == 2 and config.windows[0] == 1:
        faults.append("window_size: torchvision's version 2 divides by window_size - 1")
    return faults


def _frozen_names(num_stages: int) -> tuple[str, ...]:
    """`features` is the embedding, then a stage and a merging in turn; a merging belongs to the
    stage that it leads to, as in timm."""
    return tuple(f"features.{index}" for index in range(2 * num_stages if num_stages else 0))


SPEC = LibrarySpec(
    name="torchvision",
    title="torchvision",
    published=PUBLISHED,
    attentions=only_eager,
    faults=_faults,
    frozen_names=_frozen_names,
    takes_adapters=lambda config: False,  # all of its attention is one function over weights
    is_on_shapes=False,
)
