"""What our own Swin can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.libraries.native.names import PUBLISHED
from planner.libraries.spec import Attention, LibrarySpec, at_least_blocks, no_pretrained_window
from planner.schema import ResolvedSetting, SwinConfig

if TYPE_CHECKING:
    from torch import nn

    from planner.step.nn import Module
    from planner.step.tensor import Device


def _attentions(config: SwinConfig) -> tuple[Attention, ...]:
    """Fused in both versions: version 2's cosine is in the queries and keys that it is given."""
    return ("sdpa", "eager")


def _faults(config: SwinConfig) -> list[str]:
    return [*no_pretrained_window(config)]


def _make_module(config: SwinConfig, setting: ResolvedSetting) -> nn.Module:
    from planner.libraries.native.module import build

    return build(config, setting)


def _make_on_shapes(device: Device, config: SwinConfig, setting: ResolvedSetting) -> Module:
    from planner.libraries.native.on_shapes import build

    return build(device, config, setting)


SPEC = LibrarySpec(
    name="native",
    title="native Swin",
    published=PUBLISHED,
    attentions=_attentions,
    checkpointings=at_least_blocks,
    make_module=_make_module,
    make_on_shapes=_make_on_shapes,
    faults=_faults,
    block_classes=("BlockV1", "BlockV2"),
)
