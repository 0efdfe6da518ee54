"""The training of any model on its device, as a probe measures it and a recording records it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.training.parallel.spreading import spread_as_set
from planner.training.step import Training, lay_out
from planner.training.tasks import Task
from planner.training.tasks.blocks import blocks_to_shard, checkpoint_as_set
from planner.training.tasks.compiling import compile_as_set

TrainingT = TypeVar("TrainingT", bound=Training)
Move = Callable[[nn.Module, torch.device, torch.dtype | None], nn.Module]


def set_precision(setting: TrainSetting) -> None:
    """What fp32 matrix work is done in, said both ways: torch's defaults differ by operation.

    fp32 is fp32 everywhere; tf32 is tf32 wherever it can be. Under autocast what stays fp32 is as
    by default: matmul in fp32, cuDNN's convolutions in tf32.

    A user's module may have said otherwise when it was loaded, and by the API of torch 2.9. What
    that API set for a whole backend comes through wherever the older one says no more than "not
    tf32", and their getters raise where the two disagree; Inductor asks them. So it is unset first.
    """
    for backend in (torch.backends, torch.backends.cudnn, torch.backends.mkldnn):
        backend.fp32_precision = "none"  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("high" if setting.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = setting.precision != "fp32"
    torch.backends.cudnn.benchmark = setting.cudnn_benchmark


def _to(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    return module.to(device=device, dtype=dtype)


def build_training(
    kind: type[TrainingT], task: Task, model: Model, setting: TrainSetting, device: torch.device,
    move: Move = _to,
) -> TrainingT:  # fmt: skip
    """The module of `task` on `device`, with its optimizer, its batch and its compiler; `setting`
    has its recipe. Its code, a user's not least, may have set a precision of its own while it was
    loaded."""
    module = task.module().train()
    checkpoint_as_set(module, task, model, setting)
    set_precision(setting)
    module = move(module, device, torch.bfloat16 if setting.precision == "pure-bf16" else None)
    lay_out(module, setting)
    blocks = partial(blocks_to_shard, module, task, model)
    spread = spread_as_set(module, blocks, setting, device)
    whole = module if spread is None else spread.module
    by_block = setting.compile_scope == "blocks"
    compiled = compile_as_set(module if by_block else whole, task, model, setting)
    called = whole if compiled is None or by_block else compiled
    batch = task.batch(setting.batch_size, device)
    return kind(module, setting, task, batch, called, spread)


def recipe_of(model: Model, setting: TrainSetting) -> TrainSetting:
    """The setting with what the model's authors trained it by, where it does not say."""
    return setting.with_recipe(isinstance(model, SwinConfig))
