"""SGD with momentum (torch/optim/sgd.py)."""

from __future__ import annotations

from planner.step.optimizers.base import Optimizer
from planner.step.pointwise import like


class SGD(Optimizer):
    """In place, and one momentum buffer a parameter."""

    def step(self) -> None:
        if not self.state:
            label = "aten.empty_like" if self.is_fused else "aten.clone"
            buffers = [self.keep(like(p, label)) for p in self.parameters]
            self.state["momentum_buffer"] = buffers
        if self.is_fused:
            self.cost("aten._fused_sgd_", 2, 3)
            return
        self.cost("aten._foreach_mul_", 1, 1)
        self.cost("aten._foreach_add_", 1, 2)
        self.cost("aten._foreach_add_", 1, 2)
