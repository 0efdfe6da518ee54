"""`torch.nn.utils.clip_grad_norm_` on shapes."""

from __future__ import annotations

from planner.step.optimizers.base import Optimizer
from planner.step.reductions import take_reduction
from planner.step.tensor import Tensor, empty


def clip_gradients(optimizer: Optimizer) -> None:
    """A norm a gradient, stacked and reduced; then all scaled in place.

    The norm that it returns is a local of its caller's only, who throws it away.
    """
    device = optimizer.device
    dtype = optimizer.parameters[0].dtype

    def scalar(label: str) -> Tensor:
        return empty(device, (), dtype, label)

    norms = [scalar("aten._foreach_norm") for _ in optimizer.parameters]
    optimizer.cost("aten._foreach_norm", 0, 1)
    stacked = empty(device, (len(norms),), dtype, "aten.stack")
    total = scalar("aten.linalg_vector_norm")
    take_reduction(stacked, (0,), "aten.linalg_vector_norm")
    del norms, stacked
    shifted = scalar("aten.add")
    inverse = scalar("aten.reciprocal")
    coefficient = scalar("aten.mul")
    del shifted, inverse
    clamped = scalar("aten.clamp")
    optimizer.cost("aten._foreach_mul_", 1, 1)
    del coefficient, clamped, total
