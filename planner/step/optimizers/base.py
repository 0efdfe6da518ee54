"""What every optimizer on shapes has: parameters, the state it keeps, and the cost of its kernels.

Each optimizer is transcribed from torch.optim (2.13; lion from timm.optim) with the same locals,
since what a local keeps alive is memory. foreach is torch's default on CUDA: its temporaries are
whole lists, one tensor a parameter; forloop goes one by one; fused works in place. `step` scalars
live on the host unless the implementation is fused, and are not counted there.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.schema import TrainSetting
from planner.step.autograd import pointwise_cost
from planner.step.pointwise import like
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
        raise AssertionError("an optimizer is one of those in this package")

    @property
    def is_foreach(self) -> bool:
        return self.setting.optimizer_implementation == "foreach"

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

    def temporary(self, parameter: Tensor, label: str, num_inputs: int = 1) -> Tensor:
        """A new tensor the size of one parameter, made by one kernel."""
        made = like(parameter, label)
        pointwise_cost(self.device, label, made, num_inputs)
        return made

    def in_place(self, name: str, tensor: Tensor, num_inputs: int, times: int = 1) -> None:
        """Kernels that read `num_inputs` tensors of the size of `tensor` and write it."""
        for _ in range(times):
            pointwise_cost(self.device, name, tensor, num_inputs)

    def cost(self, name: str, num_written: int, num_read: int) -> None:
        """Kernels that read and write so many tensors the size of the parameters."""
        num_bytes = self.num_bytes * (num_written + num_read)
        count = len(self.parameters)
        kernels = -(-count // FOREACH_TENSORS_A_KERNEL)
        if self.setting.optimizer_implementation == "forloop":
            name, kernels = name.replace("_foreach", ""), count
        self.device.compute(name, "pointwise", "float32", self.numel, num_bytes, kernels)


# A multi-tensor kernel takes at most so many tensors at a time
# (depth_to_max_tensors in aten/src/ATen/native/cuda/MultiTensorApply.cuh, for two or three lists).
FOREACH_TENSORS_A_KERNEL = 64
