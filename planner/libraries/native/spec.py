"""What our own Swin can do."""

from __future__ import annotations

from planner.libraries.native.names import PUBLISHED
from planner.libraries.spec import Attention, LibrarySpec, at_least_blocks, no_pretrained_window
from planner.schema import SwinConfig


def _attentions(config: SwinConfig) -> tuple[Attention, ...]:
    """Fused in both versions: version 2's cosine is in the queries and keys that it is given."""
    return ("sdpa", "eager")


def _faults(config: SwinConfig) -> list[str]:
    return [*no_pretrained_window(config)]


SPEC = LibrarySpec(
    name="native",
    title="native Swin",
    published=PUBLISHED,
    attentions=_attentions,
    checkpointings=at_least_blocks,
    faults=_faults,
)
