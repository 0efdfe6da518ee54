"""RAdam (torch/optim/radam.py) once it is rectified, which it is from about its sixth step on."""

from __future__ import annotations

from planner.step.optimizers.base import Optimizer
from planner.step.tensor import Tensor


class RAdam(Optimizer):
    """exp_avg and exp_avg_sq."""

    def step(self) -> None:
        if not self.state:
            self.make_state("exp_avg", "exp_avg_sq")
        if self.is_foreach:
            self._foreach()
        else:
            self._forloop()

    def _foreach(self) -> None:
        self.cost("aten._foreach_lerp_", 1, 2)
        self.cost("aten._foreach_mul_", 1, 1)
        self.cost("aten._foreach_addcmul_", 1, 3)
        buffer = self.temporaries("aten._foreach_sqrt")
        for name in ("add_", "div_", "reciprocal_", "add_"):
            self.cost(f"aten._foreach_{name}", 1, 1)
        self.cost("aten._foreach_addcmul_", 1, 3)
        del buffer

    def _forloop(self) -> None:
        bias_corrected_exp_avg = None
        for parameter in self.parameters:
            self.in_place("aten.lerp_", parameter, 2)
            self.in_place("aten.mul_", parameter, 1)
            self.in_place("aten.addcmul_", parameter, 3)
            bias_corrected_exp_avg = self.temporary(parameter, "aten.div")
            scaled = self.temporary(parameter, "aten.mul")
            adaptive_lr = self._compute_adaptive_lr(parameter)
            adapted = self.temporary(parameter, "aten.mul", 2)
            del scaled, adaptive_lr
            rectified = self.temporary(parameter, "aten.mul")
            del adapted
            self.in_place("aten.add_", parameter, 2)
            del rectified
        del bias_corrected_exp_avg

    def _compute_adaptive_lr(self, parameter: Tensor) -> Tensor:
        """`number / exp_avg_sq.sqrt().add_(eps)`: the product of a reciprocal."""
        exp_avg_sq_sqrt = self.temporary(parameter, "aten.sqrt")
        self.in_place("aten.add_", parameter, 1)
        reciprocal = self.temporary(parameter, "aten.reciprocal")
        quotient = self.temporary(parameter, "aten.mul")
        del reciprocal, exp_avg_sq_sqrt
        return quotient
