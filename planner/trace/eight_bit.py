"""torchao's 8-bit AdamW under a trace: its state is real, its compiled step is stood in for.

torch compiles nothing while fake tensors are traced, and uncompiled the step would take many
temporaries that compiled code never makes. Needs torchao where such a step is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from planner.core.schema import TrainSetting
from planner.step.optimizers.adamw_8bit import BLOCK, TABLE, work_of
from planner.training.step import import_adamw_8bit


def load_8bit(setting: TrainSetting) -> None:
    """Imports torchao and makes its tables of values, which cannot be made of fake tensors."""
    if setting.optimizer_implementation != "8bit":
        return
    import_adamw_8bit()
    from torchao.optim import subclass_8bit

    subclass_8bit.get_qmap_signed()
    subclass_8bit.get_qmap_unsigned()


@contextlib.contextmanager
def compiled_step_as_measured(
    setting: TrainSetting, events: list[Any], detailed: bool
) -> Iterator[None]:
    """Within, `torch.compile` in the optimizer gives what takes the memory of compiled code."""
    if setting.optimizer_implementation != "8bit":
        yield
        return
    from torchao.optim.subclass_8bit import OptimState8bit

    def zeros(
        shape: Any,
        signed: bool = True,
        block_size: int = BLOCK,
        device: Any = None,
        dtype: Any = None,
    ) -> Any:
        """As on CUDA, where the table comes from the host and is nothing else there."""
        codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        scale = torch.zeros(codes.numel() // block_size, device=device)
        return OptimState8bit(codes, scale, torch.empty(TABLE), signed, dtype=dtype)

    def step(p: Tensor, grad: Tensor, count: Tensor, exp_avg: Any, *_: Any) -> None:
        call, update = work_of(p.numel(), p.element_size())
        if detailed:
            events.append(call)
        taken: list[Tensor] = []
        if isinstance(exp_avg, OptimState8bit):
            taken += [torch.empty(exp_avg.scale.shape) for _ in range(2)]
            taken += [torch.empty(p.shape) for _ in range(2)]
        if detailed:
            events.append(update)

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return step

    with (
        mock.patch.object(OptimState8bit, "zeros", zeros),
        mock.patch.object(torch, "compile", compiled),
    ):
        yield
