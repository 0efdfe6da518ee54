"""Activation checkpointing of any module, in place.

By the switch of the module's library where it has one (timm, transformers), else block by block: a
block keeps its inputs only, and runs its forward again in backward. Imports only torch, so that a
script which `planner emit` writes can hold a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
TORCH_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def checkpoint_blocks(
    module: nn.Module, blocks: Iterable[nn.Module] | None = None
) -> tuple[str, ...]:
    """Checkpoints `module` in place and returns what was done, in sentences.

    `blocks` are the modules to wrap. Without them each library's own switch is turned on, and the
    repeated blocks that no switch reaches are wrapped. Raises ValueError where there are none.
    """
    switched: list[nn.Module] = []
    if blocks is None:
        switched = list(_switch_on(module))
        reached = {id(inner) for outer in switched for inner in outer.modules()}
        blocks = [b for b in repeated_blocks(module) if not _overlaps(b, reached)]
    wrapped = list(blocks)
    if not switched and not wrapped:
        raise ValueError("no repeated blocks were found, and no switch of a library")
    checkpoint_in_place(wrapped)
    return tuple(_sentences(switched, wrapped))


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """What stands in containers beside others of its class: the innermost such modules.

    A block has layers within it, and a class of its own, other than torch's layers.
    """
    found = {
        id(child): child
        for container in module.modules()
        if isinstance(container, CONTAINERS)
        for child in container.children()
        if _may_be_block(child)
    }
    count = Counter(type(child) for child in found.values())
    repeated = {key: child for key, child in found.items() if count[type(child)] > 1}
    return [
        child
        for child in repeated.values()
        if not any(id(inner) in repeated for inner in child.modules() if inner is not child)
    ]


def checkpoint_in_place(modules: Iterable[nn.Module]) -> None:
    """From here on each module keeps only its inputs and computes its inside again in backward.

    Only its class changes, so that names in the state dict stay what they are, and a copy of the
    module checkpoints itself.
    """
    for module in modules:
        module.__class__ = _checkpointed(type(module))


def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kind.forward, self, *args, use_reentrant=False, **kwargs)

    return type(f"Checkpointed{kind.__name__}", (kind,), {"forward": forward})


def _may_be_block(module: nn.Module) -> bool:
    if isinstance(module, TORCH_BLOCKS):
        return True
    is_own = not type(module).__module__.startswith(("torch.nn.", "torch.jit."))
    has_layers = any(next(c.parameters(), None) is not None for c in module.children())
    return is_own and has_layers


def _overlaps(block: nn.Module, reached: set[int]) -> bool:
    return any(id(inner) in reached for inner in block.modules())


def _switch_on(module: nn.Module) -> Iterator[nn.Module]:
    """Turns on the outermost switches within `module`; yields the modules that have them."""
    if _turn_on(module):
        yield module
        return
    for child in module.children():
        yield from _switch_on(child)


def _turn_on(module: Any) -> bool:
    try:
        if hasattr(module, "set_grad_checkpointing"):  # timm
            module.set_grad_checkpointing(True)
        elif hasattr(module, "activation_checkpointing_enable"):  # transformers
            module.activation_checkpointing_enable({"use_reentrant": False})
        elif hasattr(module, "gradient_checkpointing_enable"):  # transformers before that
            module.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            return False
    except (AssertionError, NotImplementedError, ValueError):  # the method is there, and refuses
        return False
    if hasattr(getattr(module, "config", None), "use_cache"):
        module.config.use_cache = False  # a forward run again would append to it again
    return True


def _sentences(switched: list[nn.Module], wrapped: list[nn.Module]) -> Iterator[str]:
    for module in switched:
        yield f"checkpointing is {type(module).__name__}'s own, turned on by its switch"
    names = Counter(type(block).__mro__[1].__name__ for block in wrapped)
    if names:
        yield "checkpointed: " + ", ".join(f"{n} {name}" for name, n in names.items())
    inner = (m for outer in (*switched, *wrapped) for m in outer.modules())
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats for m in inner):
        yield (
            "BatchNorm in a checkpointed block updates its running statistics twice a step, since "
            "its forward runs twice; gradients are the same"
        )
