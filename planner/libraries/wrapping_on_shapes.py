"""Checkpointing in place on shapes: what `planner.libraries.checkpointing` does to real modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from planner.step.checkpointing import checkpoint
from planner.step.nn import Module, ReLU

# Kept, since a class is a cycle, which only the collector would free.
_CHECKPOINTED: dict[tuple[type[Module], bool], type[Module]] = {}


def checkpoint_in_place(modules: Iterable[Module], selective: bool = False) -> None:
    """From now on each module saves only its inputs and recomputes its forward in backward; with
    `selective` it keeps the results of matrix products and attention too."""
    for module in modules:
        if selective:
            for inner in module.descendants():
                if isinstance(inner, ReLU):
                    inner.in_place = False
        kind = (type(module), selective)
        if kind not in _CHECKPOINTED:
            _CHECKPOINTED[kind] = _checkpointed(*kind)
        module.__class__ = _CHECKPOINTED[kind]


def _checkpointed(kind: type[Module], selective: bool) -> type[Module]:
    def forward(self: Module, *args: Any) -> Any:
        return checkpoint(kind.forward, self, *args, selective=selective)

    return type(f"Checkpointed{kind.__name__}", (kind,), {"forward": forward})
