"""What our own Swin can do."""

from __future__ import annotations

from planner.core.schema import SwinConfig
from planner.libraries.native.names import PUBLISHED
from planner.libraries.spec import Attention, LibrarySpec, no_pretrained_window


def _attentions(config: SwinConfig) -> tuple[Attention, ...]:
    """Fused in both versions: version 2's cosine is in the queries and keys that it is given."""
    return ("sdpa", "eager")


SPEC = LibrarySpec(
    name="native",
    title="native Swin",
    published=PUBLISHED,
    attentions=_attentions,
    faults=no_pretrained_window,
    block_classes=("BlockV1", "BlockV2"),
)
