"""Frozen weights and low-rank adapters (LoRA, arXiv 2106.09685) in a real module.

Needs torch: imported only by what builds a real module. Mirrored by `adapters_on_shapes.py`.
Imports nothing of the planner: emitted scripts hold what they need of it.
"""

from __future__ import annotations

import math
import re

from torch import Tensor, nn
from torch.nn import functional as F


class LoraLinear(nn.Module):
    """A linear layer as it was, plus a trained product of rank r: x A^T B^T.

    `lora_a` is [r, in] and `lora_b` [out, r], which begins at zero. The product is scaled by
    alpha / r, with alpha = r.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        like = base.weight
        self.lora_a = nn.Parameter(like.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(like.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        scaling = 1.0  # peft multiplies by it too: a kernel and a tensor
        return y + F.linear(F.linear(x, self.lora_a), self.lora_b) * scaling


def freeze(module: nn.Module, frozen: str) -> None:
    """Trains no parameter whose name begins with the pattern `frozen`."""
    for name, parameter in module.named_parameters():
        if re.match(frozen, name):
            parameter.requires_grad_(False)


def add_adapters(module: nn.Module, adapted: str, rank: int) -> None:
    """Puts an adapter in the place of each linear layer whose whole name matches `adapted`."""
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear) and re.fullmatch(adapted, name):
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, LoraLinear(child, rank))
