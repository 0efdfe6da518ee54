"""The compilation that a setting asks for, done to the module of any task."""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config
from torch import nn

from planner.core.errors import UnsupportedError
from planner.core.schema import Model, TrainSetting
from planner.training.compilation import compile_blocks
from planner.training.tasks.blocks import blocks_of
from planner.training.tasks.contract import Task


def compile_as_set(module: nn.Module, task: Task, model: Model, setting: TrainSetting) -> Any:
    """What is called in the place of `module` where `setting` compiles it: the compiled module, or
    `module` itself, its blocks compiled in place; None where nothing is compiled.

    Raises UnsupportedError where there are no blocks.
    """
    if setting.compile == "off":
        return None
    torch._functorch.config.activation_memory_budget = setting.activation_memory_budget
    if setting.compile_scope == "model":
        return torch.compile(module, **setting.compile_arguments)  # type: ignore[call-overload]
    compile_blocks(blocks_to_compile(module, task, model), **setting.compile_arguments)
    return module


def blocks_to_compile(module: nn.Module, task: Task, model: Model) -> list[nn.Module]:
    """The blocks that the task names, else those that are found. Raises UnsupportedError."""
    blocks = blocks_of(module, task)
    if not blocks:
        raise UnsupportedError(
            f"{model.title} cannot be compiled block by block: no repeated blocks were found.",
            "Return a task that names its blocks, blocks(module), or set compile_scope=model.",
        )
    return blocks
