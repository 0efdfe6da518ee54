"""A real module built without filling its weights, and then made fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from planner.core.schema import Model, TrainSetting
from planner.libraries.building import Build
from planner.trace.kernels import is_in_place
from planner.training.step import float8_notes, lay_out
from planner.training.tasks import Task, as_task
from planner.training.tasks.blocks import checkpoint_as_set
from planner.training.tasks.making import GivenTask

_LARGE = 1 << 16  # elements: above this nothing but a weight is made while a model is built
_FILLED = tuple(
    getattr(torch.ops.aten, name).default for name in ("zeros", "ones", "full", "rand", "randn")
)


class _Unfilled(TorchDispatchMode):
    """Large tensors get an address and no values: pages that nobody writes cost no memory."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLED and torch.Size(args[0]).numel() > _LARGE:
            return torch.empty(args[0], **{k: v for k, v in kwargs.items() if k != "generator"})
        if is_in_place(func) and isinstance(args[0], Tensor) and args[0].numel() > _LARGE:
            return args[0]
        if func is torch.ops.aten.any.default and args[0].numel() > _LARGE:
            # `trunc_normal_` draws again until no value is out of bounds: these never change.
            return torch.zeros((), dtype=torch.bool)
        return func(*args, **kwargs)


class Built(NamedTuple):
    """A task and its module; `notes` say what was done to the module."""

    task: Task
    module: nn.Module
    notes: tuple[str, ...]


def build_task(build: Build, model: Model, setting: TrainSetting) -> Built:
    """The task of what `build` makes (a module or a task), and its module in training mode and
    checkpointed as `setting` says, large weights without values."""
    with _Unfilled():  # type: ignore[no-untyped-call]
        task = as_task(build(), model, setting)
        module = task.module()
        module.train()
        notes = checkpoint_as_set(module, task, model, setting)
        if setting.precision == "pure-bf16":
            module.to(torch.bfloat16)
        lay_out(module, setting)
    if setting.precision == "fp8":
        notes = (*notes, *float8_notes(module, setting))
    return Built(task, module, notes)


def given_batch(task: Task, size: int) -> Any:
    """A real batch of a user's task, which may read values; None where fake tensors will do."""
    if size and isinstance(task, GivenTask) and not task.on_shapes:
        return task.batch(size, torch.device("cpu"))
    return None


def make_fake(
    module: nn.Module,
    mode: FakeTensorMode,
    learn: Callable[[Tensor, Tensor], None] = lambda fake, real: None,
) -> None:
    """Replaces each parameter and buffer by a fake one; a tied one stays tied.

    `learn` hears of the values of a buffer of integers or booleans: a table or a counter, which
    data does not change.
    """
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = mode.from_tensor(parameter)  # type: ignore[assignment]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                fake = mode.from_tensor(buffer)
                child._buffers[name] = fake
                if not buffer.is_floating_point() and not buffer.is_complex():
                    learn(fake, buffer)
