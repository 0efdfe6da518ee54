"""NAdam (torch/optim/nadam.py)."""

from __future__ import annotations

from planner.step.optimizers.base import Optimizer


class NAdam(Optimizer):
    """exp_avg and exp_avg_sq; `mu_product` and `step` are scalars of the host."""

    def step(self) -> None:
        if not self.state:
            self.make_state("exp_avg", "exp_avg_sq")
        if self.is_foreach:
            self.cost("aten._foreach_lerp_", 1, 2)
            self.cost("aten._foreach_mul_", 1, 1)
            self.cost("aten._foreach_addcmul_", 1, 3)
            exp_avg_sq_sqrt = self.temporaries("aten._foreach_sqrt")
            self.cost("aten._foreach_div_", 1, 1)
            self.cost("aten._foreach_add_", 1, 1)
            self.cost("aten._foreach_addcdiv_", 1, 3)
            self.cost("aten._foreach_addcdiv_", 1, 3)
            del exp_avg_sq_sqrt
            return
        denom = None
        for parameter in self.parameters:
            self.in_place("aten.lerp_", parameter, 2)
            self.in_place("aten.mul_", parameter, 1)
            self.in_place("aten.addcmul_", parameter, 3)
            quotient = self.temporary(parameter, "aten.div")
            denom = self.temporary(parameter, "aten.sqrt")
            del quotient
            self.in_place("aten.add_", parameter, 1)
            self.in_place("aten.addcdiv_", parameter, 3, times=2)
        del denom
