"""Checkpointing for libraries that have none, or less: their own modules, wrapped in place.

Needs torch: imported only by what builds a real module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_in_place(modules: Iterable[nn.Module]) -> None:
    """From here on each module keeps its inputs alone and computes its inside again in backward.

    Only its class changes, so that names in the state dict stay what they are.
    """
    for module in modules:
        module.__class__ = _checkpointed(type(module))


def chosen_stages(stages: Sequence[nn.Module], numbers: tuple[int, ...] | None) -> list[nn.Module]:
    """The stages that `numbers` names, or all where it is None."""
    return list(stages) if numbers is None else [stages[number] for number in numbers]


def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any) -> Any:
        return checkpoint(kind.forward, self, *args, use_reentrant=False)

    return type(f"Checkpointed{kind.__name__}", (kind,), {"forward": forward})
