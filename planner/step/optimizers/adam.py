"""Adam and AdamW (torch/optim/adam.py)."""

from __future__ import annotations

from planner.step.optimizers.base import Optimizer


class Adam(Optimizer):
    """exp_avg and exp_avg_sq."""

    def step(self) -> None:
        if not self.state:
            self.make_state("exp_avg", "exp_avg_sq")
        if self.is_fused:
            self.cost("aten._fused_adamw_", 3, 4)
        elif self.is_foreach:
            self._foreach()
        else:
            self._forloop()

    def _foreach(self) -> None:
        """`_foreach_sqrt` returns a list the size of the parameters; all else is in place."""
        if self.setting.optimizer_family == "adamw":
            self.cost("aten._foreach_mul_", 1, 1)
        self.cost("aten._foreach_lerp_", 1, 2)
        self.cost("aten._foreach_mul_", 1, 1)
        self.cost("aten._foreach_addcmul_", 1, 2)
        exp_avg_sq_sqrt = self.temporaries("aten._foreach_sqrt")
        self.cost("aten._foreach_div_", 1, 1)
        self.cost("aten._foreach_add_", 1, 1)
        self.cost("aten._foreach_addcdiv_", 1, 3)
        del exp_avg_sq_sqrt

    def _forloop(self) -> None:
        """`denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)`, one by one."""
        denom = None
        decays = self.setting.optimizer_family == "adamw"
        for parameter in self.parameters:
            self.in_place("aten.mul_", parameter, 1, times=1 + decays)
            self.in_place("aten.lerp_", parameter, 2)
            self.in_place("aten.addcmul_", parameter, 3)
            root = self.temporary(parameter, "aten.sqrt")
            denom = self.temporary(parameter, "aten.div")
            del root
            self.in_place("aten.add_", parameter, 1)
            self.in_place("aten.addcdiv_", parameter, 3)
        del denom
