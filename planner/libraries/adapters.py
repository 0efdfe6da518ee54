"""Frozen weights and low-rank adapters (LoRA, arXiv 2106.09685) in a real module.

Needs torch: imported only by what builds a real module. Mirrored by `adapters_on_shapes.py`.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from planner.libraries.trainable import LORA_SCALE, Trainable


class LoraLinear(nn.Module):
    """A linear layer as it was, plus a trained product of rank r: x A^T B^T.

    `lora_a` is [r, in] and `lora_b` [out, r], which begins at zero.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        like = base.weight
        self.lora_a = nn.Parameter(like.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(like.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(x, self.lora_a), self.lora_b)
        y: Tensor = self.base(x) + update * LORA_SCALE
        return y


def choose_trainable(module: nn.Module, trainable: Trainable) -> None:
    """Freezes what is not trained and puts the adapters in, all in place."""
    for name, parameter in module.named_parameters():
        if trainable.is_frozen(name):
            parameter.requires_grad_(False)
    adapted = [
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and trainable.is_adapted(name)
    ]
    for name, linear in adapted:
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, LoraLinear(linear, trainable.lora_rank))
