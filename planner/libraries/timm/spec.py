"""What timm's Swin can do."""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.spec import Attention, LibrarySpec, no_pretrained_window, required
from planner.libraries.timm.names import PUBLISHED, TAGGED


def _attentions(config: SwinConfig) -> tuple[Attention, ...]:
    """Version 1 has a fused attention that timm leaves off; version 2 has none."""
    return ("eager", "sdpa") if config.version == 1 else ("eager",)


def _faults(config: SwinConfig) -> list[str]:
    return [
        *required(config, patch_norm=True, absolute_position_embedding=False),
        *no_pretrained_window(config),
    ]


SPEC = LibrarySpec(
    name="timm",
    title="timm",
    published=PUBLISHED,
    tagged=TAGGED,
    attentions=_attentions,
    faults=_faults,
    block_classes=("SwinTransformerBlock", "SwinTransformerV2Block"),
)
