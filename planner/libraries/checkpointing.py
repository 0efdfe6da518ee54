"""Activation checkpointing of any module, in place.

By the switch of the module's library where it has one (timm, transformers, diffusers), else block
by block: a block keeps its inputs only, and runs its forward again in backward. Imports only torch,
so that a script which `planner emit` writes can hold a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
TORCH_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def checkpoint_blocks(
    module: nn.Module, blocks: Iterable[nn.Module] | None = None, selective: bool = False
) -> tuple[str, ...]:
    """Checkpoints `module` in place and returns what was done, in sentences.

    `blocks` are the modules to wrap. Without them each library's own switch is turned on, and the
    repeated blocks that no switch reaches are wrapped. Raises ValueError where there are none.
    With `selective` what is wrapped keeps its matrix products and attention.
    """
    switched: list[nn.Module] = []
    if blocks is None:
        switched = list(_switch_on(module))
        reached = {id(inner) for outer in switched for inner in outer.modules()}
        blocks = [b for b in repeated_blocks(module) if not _overlaps(b, reached)]
    wrapped = list(blocks)
    if not switched and not wrapped:
        raise ValueError("no repeated blocks were found, and no switch of a library")
    checkpoint_in_place(wrapped, selective)
    _keep_no_cache(module)
    return tuple(_sentences(switched, wrapped, selective))


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """What stands in containers beside others of its class: the innermost such modules, in the
    order in which `module` holds them.

    A block has layers within it, and a class of its own, other than torch's layers.
    """
    found = {
        id(child): child
        for container in module.modules()
        if isinstance(container, CONTAINERS)
        for child in container.children()
        if _may_be_block(child)
    }
    kinds = {key: _kind(child) for key, child in found.items()}
    count = Counter(kinds.values())
    repeated = {key: child for key, child in found.items() if count[kinds[key]] > 1}
    return [
        child
        for child in module.modules()
        if id(child) in repeated
        and not any(id(inner) in repeated for inner in child.modules() if inner is not child)
    ]


def checkpoint_in_place(modules: Iterable[nn.Module], selective: bool = False) -> None:
    """From here on each module keeps only its inputs and computes its inside again in backward;
    with `selective` it keeps the results of matrix products and attention too.

    Only its class changes, so that names in the state dict stay what they are, and a copy of the
    module checkpoints itself.
    """
    for module in modules:
        if selective:
            _leave_results(module)
        kind: Any = type(module)
        module.__class__ = _checkpointed(kind, selective)


def _leave_results(module: nn.Module) -> None:
    """A result that is kept must not change: activations (ReLU) make a new one from here on."""
    inner: Any
    for inner in module.modules():
        if getattr(inner, "inplace", False):
            inner.inplace = False


@cache
def _checkpointed(kind: Any, selective: bool) -> type[nn.Module]:
    """One class for all modules of a kind, so that like modules stay alike to a compiler."""
    how: dict[str, Any] = {"context_fn": keep} if selective else {}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kind.forward, self, *args, use_reentrant=False, **how, **kwargs)

    made = {"forward": forward, "kind_checkpointed": kind}
    return type(f"Checkpointed{kind.__name__}", (kind,), made)


# What costs most to compute again for each byte that it takes to keep.
KEPT_OPERATIONS = frozenset(
    f"aten.{name}.default"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm",
        "_flash_attention_forward", "_efficient_attention_forward",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
)  # fmt: skip


class Keep:
    """What one checkpointed call keeps of its forward for its recomputation.

    Attention with dropout is not kept: a kernel that is passed over draws no random numbers, and
    what is drawn after it (stochastic depth) would not be what the forward drew. What is kept must
    not change: torch does not see that behind `@` of more than two dimensions (an unsafe view), and
    computes other gradients there (2.13).
    """

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        schema = getattr(operation, "_schema", None)
        is_product = str(operation) in KEPT_OPERATIONS
        if schema is None or not (is_product or schema.is_mutable):
            return CheckpointPolicy.PREFER_RECOMPUTE
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        written = [given.get(a.name) for a in schema.arguments if a.is_write]
        if not self._storages.isdisjoint(_storages(written)):
            raise RuntimeError(
                f"selective checkpointing keeps the results of matrix products, and {operation} "
                "writes into one: checkpoint whole blocks, or write that result anew"
            )
        if not is_product or given.get("dropout_p"):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._storages.update(_storages([getattr(context, "op_output", None)]))
        return CheckpointPolicy.MUST_SAVE


def _storages(values: list[Any]) -> set[int]:
    flat = [v for value in values for v in (value if isinstance(value, tuple | list) else [value])]
    return {v.untyped_storage()._cdata for v in flat if isinstance(v, Tensor)}


def keep() -> Any:
    """The two contexts of `checkpoint(..., context_fn=keep)`."""
    return create_selective_checkpoint_contexts(Keep())


def _kind(module: nn.Module) -> type[nn.Module]:
    """Its class, before it was made one that checkpoints itself."""
    kind: type[nn.Module] = vars(type(module)).get("kind_checkpointed", type(module))
    return kind


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
        elif hasattr(module, "enable_gradient_checkpointing"):  # diffusers
            module.enable_gradient_checkpointing()
        else:
            return False
    except (AssertionError, NotImplementedError, ValueError):  # the method is there, and refuses
        return False
    return True


def _keep_no_cache(module: nn.Module) -> None:
    """A forward run again would append to it again."""
    for inner in module.modules():
        config: Any = getattr(inner, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False


def _sentences(
    switched: list[nn.Module], wrapped: list[nn.Module], selective: bool
) -> Iterator[str]:
    for module in switched:
        yield f"checkpointing is {type(module).__name__}'s own, turned on by its switch"
    names = Counter(type(block).__mro__[1].__name__ for block in wrapped)
    if names:
        but = " but for matrix products and attention" if selective else ""
        yield f"checkpointed{but}: " + ", ".join(f"{n} {name}" for name, n in names.items())
    inner = (m for outer in (*switched, *wrapped) for m in outer.modules())
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats for m in inner):
        yield (
            "BatchNorm in a checkpointed block updates its running statistics twice a step, since "
            "its forward runs twice; gradients are the same"
        )
