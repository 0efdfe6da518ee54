"""Checkpointing for libraries that have none, or less: their own modules, wrapped in place.

Needs torch: imported only by what builds a real module.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from planner.checkpointing import checkpoint_in_place

__all__ = ["checkpoint_in_place", "chosen_stages"]


def chosen_stages(stages: Sequence[nn.Module], numbers: tuple[int, ...] | None) -> list[nn.Module]:
    """The stages that `numbers` names, or all where it is None."""
    return list(stages) if numbers is None else [stages[number] for number in numbers]
