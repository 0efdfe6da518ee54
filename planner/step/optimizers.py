"""Optimizers on shapes: the state they keep, and what a step allocates on the way.

From torch/optim/{adam,adamw,sgd}.py (2.13). foreach is torch's default on CUDA: its temporaries
are whole lists, one tensor a parameter; fused works in place; forloop goes one by one. `step`
scalars live on the host unless the implementation is fused, and are not counted there.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import UnsupportedError
from planner.schema import TrainSetting
from planner.step.autograd import pointwise_cost
from planner.step.pointwise import like
from planner.step.tensor import Device, Parameter, Tensor, empty

Tensors = Sequence[Tensor]


class Optimizer:
    """What one optimizer keeps for each parameter, in PyTorch's names, and how it steps."""

    def __init__(self, device: Device, parameters: Sequence[Parameter], setting: TrainSetting):
        self.device = device
        self.parameters = list(parameters)
        self.setting = setting
        self.state: dict[str, list[Tensor]] = {}

    def step(self) -> None:
        """One update. The first one makes the state."""
        raise AssertionError("an optimizer is one of the classes below")

    def gradients(self) -> list[Tensor]:
        found = [p.cell.grad for p in self.parameters]
        return [grad for grad in found if grad is not None]

    def zero_grad(self, set_to_none: bool) -> None:
        for parameter in self.parameters:
            if set_to_none:
                parameter.cell.grad = None
        if not set_to_none:
            self.cost("aten._foreach_zero_", 1, 0)

    def make_state(self, *names: str) -> None:
        """`zeros_like` of every parameter for every name, parameter by parameter.

        A fused implementation keeps its `step` on the device too, one fp32 scalar a parameter.
        """
        self.state = {name: [] for name in ("step", *names)}
        for parameter in self.parameters:
            if self.setting.optimizer_implementation == "fused":
                scalar = empty(self.device, (), "float32", "aten.zeros")
                self.state["step"].append(self.keep(scalar))
            for name in names:
                self.state[name].append(self.keep(like(parameter, "aten.zeros_like")))

    def keep(self, tensor: Tensor) -> Tensor:
        tensor.storage.assign("optimizer_state")
        return tensor

    def temporaries(self, label: str) -> list[Tensor]:
        """A list of new tensors, one a parameter, as a foreach operation returns."""
        return [like(parameter, label) for parameter in self.parameters]

    def cost(self, name: str, num_written: int, num_read: int) -> None:
        """Kernels that read and write so many tensors the size of the parameters."""
        numel = sum(p.numel for p in self.parameters)
        num_bytes = sum(p.num_bytes for p in self.parameters) * (num_written + num_read)
        kernels = -(-len(self.parameters) // FOREACH_TENSORS_A_KERNEL)
        self.device.compute(name, "pointwise", "float32", numel, num_bytes, kernels)


# A multi-tensor kernel takes at most so many tensors at a time
# (depth_to_max_tensors in aten/src/ATen/native/cuda/MultiTensorApply.cuh, for two or three lists).
FOREACH_TENSORS_A_KERNEL = 64


class Adam(Optimizer):
    """Adam and AdamW, with or without AMSGrad."""

    def step(self) -> None:
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * self.setting.amsgrad
        implementation = self.setting.optimizer_implementation
        if not self.state:
            self.make_state(*names)
        if implementation == "fused":
            self.cost("aten._fused_adamw_", 3, 4)
        elif implementation == "foreach":
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
        if self.setting.amsgrad:
            self.cost("aten._foreach_maximum_", 1, 2)
        square_roots = self.temporaries("aten._foreach_sqrt")
        self.cost("aten._foreach_sqrt", 1, 1)
        self.cost("aten._foreach_div_", 1, 1)
        self.cost("aten._foreach_add_", 1, 1)
        self.cost("aten._foreach_addcdiv_", 1, 3)
        del square_roots

    def _forloop(self) -> None:
        """`denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)`, one by one."""
        denominator = None
        for parameter in self.parameters:
            for _ in range(4 + (self.setting.optimizer_family == "adamw")):
                pointwise_cost(self.device, "aten.mul_", parameter, 2)
            root = like(parameter, "aten.sqrt")
            denominator = like(parameter, "aten.div")
            del root
        del denominator


class SGD(Optimizer):
    """SGD with momentum: in place, and one buffer a parameter."""

    def step(self) -> None:
        if not self.state:
            label = "empty_like" if self.setting.optimizer_implementation == "fused" else "clone"
            self.state["momentum_buffer"] = [
                self.keep(like(p, f"aten.{label}")) for p in self.parameters
            ]
        self.cost("aten._foreach_mul_", 1, 1)
        self.cost("aten._foreach_add_", 1, 2)
        self.cost("aten._foreach_add_", 1, 2)


FAMILIES: dict[str, type[Optimizer]] = {"adamw": Adam, "adam": Adam, "sgd": SGD}


def make_optimizer(
    device: Device, parameters: Sequence[Parameter], setting: TrainSetting
) -> Optimizer:
    """The optimizer of `setting`. Raises UnsupportedError for one that is not modelled."""
    family = FAMILIES.get(setting.optimizer_family)
    if family is None:
        raise UnsupportedError(
            f"the optimizer {setting.optimizer!r} is not modelled on shapes.",
            f"Use one of {', '.join(FAMILIES)}, or pass --trace.",
        )
    return family(device, parameters, setting)


def clip_gradients(optimizer: Optimizer) -> None:
    """`clip_grad_norm_`: a norm a gradient, stacked and reduced; then scaled in place."""
    device = optimizer.device

    def scalar(label: str) -> Tensor:
        return empty(device, (), "float32", label)

    norms = [scalar("aten._foreach_norm") for _ in optimizer.parameters]
    optimizer.cost("aten._foreach_norm", 0, 1)
    stacked = empty(device, (len(norms),), "float32", "aten.stack")
    total = scalar("aten.linalg_vector_norm")
    del norms, stacked
    shifted = scalar("aten.add")
    inverse = scalar("aten.reciprocal")
    coefficient = scalar("aten.mul")
    del shifted, inverse
    clamped = scalar("aten.clamp")
    optimizer.cost("aten._foreach_mul_", 1, 1)
    del coefficient, clamped, total
