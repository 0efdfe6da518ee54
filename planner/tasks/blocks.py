"""The checkpointing that a setting asks for, done to the module of any task."""

from __future__ import annotations

from torch import nn

from planner.checkpointing import checkpoint_blocks, repeated_blocks
from planner.errors import UnsupportedError
from planner.libraries.limits import too_many_blocks
from planner.schema import Model, SwinConfig, TrainSetting
from planner.tasks.contract import Task


def checkpoint_as_set(
    module: nn.Module, task: Task, model: Model, setting: TrainSetting
) -> tuple[str, ...]:
    """Checkpoints `module` in place where `setting` says so, and returns what was done, in words.

    A Swin of ours has been built so. Elsewhere these are the blocks that the task names, or those
    that are found. Raises UnsupportedError where there are none, or fewer than `setting` says.
    """
    if isinstance(model, SwinConfig) or setting.checkpointing == "none":
        return ()
    if not setting.checkpoints_any_model:
        raise UnsupportedError(
            f"{model.title} has checkpointing none, blocks (all, blocks:6 or blocks:every-2) or "
            f"selective, not {setting.checkpointing!r}.",
            "Choose --checkpointing blocks, or name the modules in its task: blocks(module).",
        )
    named = getattr(task, "blocks", None)
    blocks = list(named(module)) if named is not None else None
    chosen = setting.chosen_blocks
    if chosen is not None:
        blocks = repeated_blocks(module) if blocks is None else blocks
        if blocks and (chosen.stop or 0) > len(blocks):
            raise too_many_blocks(model.title, len(blocks), setting).error()
        blocks = blocks[chosen]
    try:
        return checkpoint_blocks(module, blocks, setting.checkpointing == "selective")
    except ValueError as error:
        raise UnsupportedError(
            f"{model.title} cannot be checkpointed: {error}.",
            "Return a task that names its blocks, blocks(module), or choose checkpointing none.",
        ) from error
