"""Lion (timm/optim/lion.py, 1.0.31)."""

from __future__ import annotations

from planner.step.optimizers.base import Optimizer


class Lion(Optimizer):
    """Only exp_avg; `lerp` makes the updates.

    On a GPU with 64 MiB of L2 or more, timm runs foreach in chunks of parameters: the updates of
    one chunk are alive at a time. A ledger knows no GPU and has them all, which is the most.
    """

    def step(self) -> None:
        if not self.state:
            self.make_state("exp_avg")
        if self.is_foreach:
            self.cost("aten._foreach_mul_", 1, 1)
            updates = self.temporaries("aten._foreach_lerp")
            self.cost("aten.sign_", 1, 1)
            self.cost("aten._foreach_add_", 1, 2)
            self.cost("aten._foreach_lerp_", 1, 2)
            del updates
            return
        update = None
        for parameter in self.parameters:
            self.in_place("aten.mul_", parameter, 1)
            update = self.temporary(parameter, "aten.lerp", 2)
            self.in_place("aten.sign_", parameter, 1)
            self.in_place("aten.add_", parameter, 2)
            self.in_place("aten.lerp_", parameter, 2)
        del update
