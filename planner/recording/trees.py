"""The tensors within an operation's arguments or results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# What most arguments are; `tree_leaves` takes ten times as long to find nothing in them.
_WITHOUT_TENSORS = (
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of `tree`, repeated where they are."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif type(tree) is tuple or type(tree) is list:
        for branch in tree:
            _collect(branch, found)
    elif type(tree) is dict:
        for branch in tree.values():
            _collect(branch, found)
    elif not isinstance(tree, _WITHOUT_TENSORS):
        found += (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
