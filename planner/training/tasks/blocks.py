"""The checkpointing that a setting asks for, done to the module of any task."""

from __future__ import annotations

from torch import nn

from planner.core.errors import ContractError, UnsupportedError
from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.libraries.checkpointing import checkpoint_blocks, repeated_blocks
from planner.libraries.limits import block_limit
from planner.libraries.registry import find_library
from planner.training.tasks.contract import Task


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
    blocks = _wanted(module, task, model, setting)
    try:
        return checkpoint_blocks(module, blocks, setting.checkpointing == "selective")
    except ValueError as error:
        raise UnsupportedError(
            f"{model.title} cannot be checkpointed: {error}.",
            "Return a task that names its blocks, blocks(module), or choose checkpointing none.",
        ) from error


def _wanted(
    module: nn.Module, task: Task, model: Model, setting: TrainSetting
) -> list[nn.Module] | None:
    """The blocks to wrap; None where a library's own switch may checkpoint them all."""
    chosen = setting.chosen_blocks
    if chosen is None and getattr(task, "blocks", None) is None:
        return None
    blocks = blocks_of(module, task)
    fault = block_limit(model.title, len(blocks), setting)
    if blocks and fault is not None:
        raise fault.error()
    return blocks if chosen is None else blocks[chosen]


def blocks_to_shard(module: nn.Module, task: Task, model: Model) -> list[nn.Module]:
    """The blocks that gather their weights one by one where these are sharded. A Swin's are of its
    library's classes, also where a stage has only one."""
    if not isinstance(model, SwinConfig):
        return blocks_of(module, task)
    names = set(find_library(model.library).block_classes)
    kinds = ((m, {kind.__name__ for kind in type(m).__mro__}) for m in module.modules())
    return [inner for inner, kind in kinds if kind & names]


def blocks_of(module: nn.Module, task: Task) -> list[nn.Module]:
    """The blocks that the task names, else those that are found; none where there are none."""
    named = getattr(task, "blocks", None)
    if named is None:
        return repeated_blocks(module)
    blocks, own = list(named(module)), set(module.modules())
    if strange := [block for block in blocks if block not in own]:
        raise ContractError(
            f"blocks(module) returned {len(strange)} modules that are not in the module, of class "
            f"{type(strange[0]).__name__}.",
            "Return parts of the module that it is given.",
        )
    return blocks
