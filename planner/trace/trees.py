"""The tensors within an operation's arguments or results."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of `tree`, repeated where they are."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
