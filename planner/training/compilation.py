"""Each repeated block of a module compiled by itself: regional compilation.

Imports only torch, so that a script which `planner emit` writes can hold a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def compile_blocks(blocks: Sequence[nn.Module], **how: Any) -> None:
    """Compiles each block by itself, in place; `how` are arguments of `torch.compile`.

    Like blocks share a graph. torch counts the graphs of all blocks together, those of validation
    too, and beyond its limit runs what is new eagerly: the limit is raised to two for each block.
    """
    limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks))
    torch._dynamo.config.recompile_limit = limit
    for block in blocks:
        block.compile(**how)
