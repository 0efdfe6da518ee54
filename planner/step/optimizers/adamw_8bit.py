"""AdamW with moments in 8 bits (torchao/optim/adam.py, 0.18.0), in blocks of 256 elements.

A weight of at least 4096 elements, and a multiple of 256 of them, keeps for each moment a code of
one byte an element, an fp32 scale a block and a table of 256 fp32 values. Any other keeps moments
of its own dtype. Each weight is updated by code compiled for its shape.
"""

from __future__ import annotations

from planner.core.schema import TrainSetting
from planner.ledger.ledger import COMPILED_CALL, Computed
from planner.step.optimizers.base import Optimizer
from planner.step.pointwise import like
from planner.step.tensor import Parameter, Tensor, empty

BLOCK = 256  # elements of one scale, torchao's default and the Trainer's of transformers
TABLE = 256  # values that a code stands for
SMALLEST = 4096  # elements below which nothing is quantised
UPDATE = "adamw_8bit"

NOTE = (
    "adamw-8bit: two fp32 tensors the size of the weight that steps, and their scales, as in the "
    "code that torch 2.13 compiles for a CPU (torchao 0.18); on a GPU it takes at most those"
)


def notes_of(setting: TrainSetting) -> tuple[str, ...]:
    """What a ledger with this optimizer rests on."""
    return (NOTE,) if setting.optimizer_implementation == "8bit" else ()


def is_quantised(numel: int) -> bool:
    return numel >= SMALLEST and numel % BLOCK == 0


def work_of(numel: int, element_bytes: int) -> tuple[Computed, Computed]:
    """A call of compiled code, and its kernels for one weight of so many elements.

    Quantised, one kernel reads the gradient and both moments' codes and writes both moments; one
    reads those and the weight, and writes codes and weight. Else one reads four and writes three.
    """
    num_bytes, kernels = 7 * element_bytes * numel, 1
    if is_quantised(numel):
        first = element_bytes + 2 + 2 * 4
        second = 2 * 4 + 2 + 2 * element_bytes
        num_bytes, kernels = (first + second) * numel + 4 * 4 * (numel // BLOCK), 2
    return (
        Computed(COMPILED_CALL, "pointwise", "float32", 0, 0, 0, ""),
        Computed(UPDATE, "pointwise", "float32", numel, num_bytes, kernels, ""),
    )


class AdamW8bit(Optimizer):
    """exp_avg and exp_avg_sq, each made as its weight first steps; `step` lives on the host."""

    def step(self) -> None:
        is_first = not self.state
        for parameter in self.parameters:
            if is_first:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state.setdefault(name, []).extend(self._moment(parameter))
            self._update(parameter)

    def _moment(self, parameter: Parameter) -> list[Tensor]:
        """`_new_buffer`."""
        if not is_quantised(parameter.numel):
            return [self.keep(like(parameter, "aten.zeros_like"))]
        device, blocks = self.device, (parameter.numel // BLOCK,)
        return [
            self.keep(empty(device, parameter.shape, "uint8", "aten.zeros")),
            self.keep(empty(device, blocks, "float32", "aten.zeros")),
            self.keep(empty(device, (TABLE,), "float32", "aten.tensor")),
        ]

    def _update(self, parameter: Parameter) -> None:
        device = self.device
        call, update = work_of(parameter.numel, parameter.num_bytes // parameter.numel)
        device.compute(*call[:6])
        if is_quantised(parameter.numel):
            blocks = (parameter.numel // BLOCK,)
            scales = [empty(device, blocks, "float32", UPDATE) for _ in range(2)]
            moments = [empty(device, parameter.shape, "float32", UPDATE) for _ in range(2)]
            device.compute(*update[:6])
            del scales, moments
        else:
            device.compute(*update[:6])
