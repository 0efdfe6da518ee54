"""RMSprop (torch/optim/rmsprop.py), neither centered nor with momentum."""

from __future__ import annotations

from planner.step.optimizers.base import Optimizer


class RMSprop(Optimizer):
    """Only square_avg; its square root is a temporary."""

    def step(self) -> None:
        if not self.state:
            self.make_state("square_avg")
        if self.is_foreach:
            self.cost("aten._foreach_mul_", 1, 1)
            self.cost("aten._foreach_addcmul_", 1, 3)
            avg_list = self.temporaries("aten._foreach_sqrt")
            self.cost("aten._foreach_add_", 1, 1)
            self.cost("aten._foreach_addcdiv_", 1, 3)
            del avg_list
            return
        avg = None
        for parameter in self.parameters:
            self.in_place("aten.mul_", parameter, 1)
            self.in_place("aten.addcmul_", parameter, 3)
            avg = self.temporary(parameter, "aten.sqrt")
            self.in_place("aten.add_", parameter, 1)
            self.in_place("aten.addcdiv_", parameter, 3)
        del avg
