"""An optimizer on the host (torchao/optim/cpu_offload.py, 0.18.0), as far as the device sees it.

Weights of fewer than 4096 elements keep an optimizer on the device. Of each other one the gradient
is copied on a stream of its own as soon as it is there, and the weight comes back when the host has
updated it. Copies go from pinned memory to tensors of the same layout: the device allocates nothing
for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.core.schema import TrainSetting
from planner.ledger.ledger import GRADIENT_TO_HOST, IN_BACKWARD, WEIGHT_TO_DEVICE
from planner.step.optimizers.base import Optimizer
from planner.step.tensor import Device, GradientCell, Parameter

SMALLEST = 4096  # elements below which a weight is updated on the device (minimal_size)

_STATE = (
    "torchao's CPUOffloadOptimizer: weights of 4096 elements or more are updated by the host's "
    "processor; their optimizer's state, and a copy of weight and gradient in pinned memory, are "
    "on the host"
)
_GRADIENTS = (
    "gradients are freed as backward goes, but their memory is used again only once they are on "
    "the host: where memory is plentiful torch may reserve up to all of theirs more"
)


def offloading_notes(setting: TrainSetting) -> tuple[str, ...]:
    """What a ledger with an optimizer on the host rests on."""
    if setting.offload_optimizer == "none":
        return ()
    return (_STATE, *((_GRADIENTS,) if setting.offload_optimizer != "state" else ()))


class Offloaded(Optimizer):
    """`make` makes the optimizer of those weights that stay."""

    def __init__(
        self,
        device: Device,
        parameters: Sequence[Parameter],
        setting: TrainSetting,
        make: Callable[[Sequence[Parameter]], Optimizer],
    ) -> None:
        super().__init__(device, parameters, setting)
        small = [p for p in parameters if p.numel < SMALLEST]
        self.moved = {id(p.cell): p for p in parameters if p.numel >= SMALLEST}
        self.on_device = make(small) if small else None
        device.on_gradient = self.send_gradient

    def send_gradient(self, cell: GradientCell) -> None:
        """`backward_hook`."""
        weight = self.moved.get(id(cell))
        if weight is None:
            return
        self.device.scope = IN_BACKWARD
        self._transfer(GRADIENT_TO_HOST, weight, 0)
        if self.setting.offload_optimizer == "state-and-gradients":
            cell.grad = None

    def step(self) -> None:
        if self.on_device is not None:
            self.on_device.step()
        for weight in self.moved.values():
            self._transfer(WEIGHT_TO_DEVICE, weight, 1)

    def _transfer(self, name: str, weight: Parameter, kernels: int) -> None:
        self.device.compute(name, "transfer", weight.dtype, 0, weight.num_bytes, kernels)
