"""The checkpointing that a setting asks for, done to the module of any task."""

from __future__ import annotations

from torch import nn

from planner.checkpointing import checkpoint_blocks
from planner.errors import UnsupportedError
from planner.schema import Model, SwinConfig, TrainSetting
from planner.tasks.contract import Task

OFFERED = ("none", "blocks")  # of any model that is no Swin of ours


def checkpoint_as_set(
    module: nn.Module, task: Task, model: Model, setting: TrainSetting
) -> tuple[str, ...]:
    """Checkpoints `module` in place where `setting` says so, and returns what was done, in words.

    A Swin of ours has been built so. Elsewhere these are the blocks that the task names, or those
    that are found. Raises UnsupportedError where there are none.
    """
    if isinstance(model, SwinConfig) or setting.checkpointing == "none":
        return ()
    if setting.checkpointing not in OFFERED:
        raise UnsupportedError(
            f"{model.title} has checkpointing none or blocks, not {setting.checkpointing!r}.",
            "Choose --checkpointing blocks, or name the modules in its task: blocks(module).",
        )
    named = getattr(task, "blocks", None)
    try:
        return checkpoint_blocks(module, named(module) if named is not None else None)
    except ValueError as error:
        raise UnsupportedError(
            f"{model.title} cannot be checkpointed: {error}.",
            "Return a task that names its blocks, blocks(module), or choose checkpointing none.",
        ) from error
