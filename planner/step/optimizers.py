"""Optimizers on shapes: parameters, the state that each keeps, and the cost of its kernels; and the
clipping of gradients before it (`torch.nn.utils.clip_grad_norm_`).

Each is transcribed from torch.optim (2.13; lion from timm.optim) with the same locals,
since what a local keeps alive is memory. foreach is torch's default on CUDA: its temporaries are
whole lists, one tensor a parameter; fused works in place. `step` scalars live on the host unless
the implementation is fused, and are not counted there.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.schema import TrainSetting
from planner.step.pointwise import like
from planner.step.reductions import take_reduction
from planner.step.tensor import Device, Parameter, Tensor, empty


class Optimizer:
    """What one optimizer keeps for each parameter, in PyTorch's names, and how it steps."""

    def __init__(self, device: Device, parameters: Sequence[Parameter], setting: TrainSetting):
        self.device = device
        self.parameters = list(parameters)
        self.setting = setting
        self.state: dict[str, list[Tensor]] = {}
        self.numel = sum(p.numel for p in parameters)
        self.num_bytes = sum(p.num_bytes for p in parameters)

    def step(self) -> None:
        """One update. The first one makes the state."""
        raise AssertionError("an optimizer is one of those below")

    @property
    def is_fused(self) -> bool:
        return self.setting.optimizer_implementation == "fused"

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
            if self.is_fused:
                scalar = empty(self.device, (), "float32", "aten.zeros")
                self.state["step"].append(self.keep(scalar))
            for name in names:
                self.state[name].append(self.keep(like(parameter, "aten.zeros_like")))

    def keep(self, tensor: Tensor) -> Tensor:
        tensor.storage.assign("optimizer_state")
        return tensor

    def temporaries(self, label: str) -> list[Tensor]:
        """A list of new tensors, one a parameter, as a foreach operation returns."""
        self.cost(label, 1, 1)
        return [like(parameter, label) for parameter in self.parameters]

    def cost(self, name: str, num_written: int, num_read: int) -> None:
        """Kernels that read and write so many tensors the size of the parameters."""
        num_bytes = self.num_bytes * (num_written + num_read)
        kernels = -(-len(self.parameters) // FOREACH_TENSORS_A_KERNEL)
        self.device.compute(name, "pointwise", "float32", self.numel, num_bytes, kernels)


# A multi-tensor kernel takes at most so many tensors at a time
# (depth_to_max_tensors in aten/src/ATen/native/cuda/MultiTensorApply.cuh, for two or three lists).
FOREACH_TENSORS_A_KERNEL = 64


class Adam(Optimizer):
    """Adam and AdamW (torch/optim/adam.py): exp_avg and exp_avg_sq."""

    def step(self) -> None:
        if not self.state:
            self.make_state("exp_avg", "exp_avg_sq")
        if self.is_fused:
            self.cost("aten._fused_adamw_", 3, 4)
        else:
            self._foreach()

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


class Lion(Optimizer):
    """timm/optim/lion.py, 1.0.31: only exp_avg; `lerp` makes the updates.

    On a GPU with 64 MiB of L2 or more, timm runs foreach in chunks of parameters: the updates of
    one chunk are alive at a time. A ledger knows no GPU and has them all, which is the most.
    """

    def step(self) -> None:
        if not self.state:
            self.make_state("exp_avg")
        self.cost("aten._foreach_mul_", 1, 1)
        updates = self.temporaries("aten._foreach_lerp")
        self.cost("aten.sign_", 1, 1)
        self.cost("aten._foreach_add_", 1, 2)
        self.cost("aten._foreach_lerp_", 1, 2)
        del updates


class SGD(Optimizer):
    """torch/optim/sgd.py: in place, and one momentum buffer a parameter."""

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


# All others are recorded, and so is each that goes one by one.
FAMILIES: dict[str, type[Optimizer]] = {
    "adamw": Adam, "adam": Adam, "sgd": SGD, "lion": Lion,
}  # fmt: skip


def has_step(setting: TrainSetting) -> bool:
    """Whether the optimizer of `setting` has its step here."""
    is_known = setting.optimizer_implementation in ("foreach", "fused")
    return is_known and setting.optimizer_family in FAMILIES and not setting.needs_torchao


def make_optimizer(
    device: Device, parameters: Sequence[Parameter], setting: TrainSetting
) -> Optimizer:
    """The optimizer of `setting`, of a family in `FAMILIES`."""
    setting.check_optimizer()
    return FAMILIES[setting.optimizer_family](device, parameters, setting)
