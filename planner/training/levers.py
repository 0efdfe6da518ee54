# Written by 'planner emit', which replaces files that begin with this line.
"""What some settings do to any model, in place: `train.py` beside this file takes it from here.

Checkpointing, chosen blocks and stages, selective recomputation; activations in the host's memory;
frozen weights and adapters; products in 8 bits and memory formats; blocks compiled or sharded each
by itself. Imports only torch (and torchao for 8 bits).
"""

from __future__ import annotations

import math
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # of images, and of clips
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
TORCH_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
FLOAT8_LEAST, FLOAT8_MULTIPLE = 64, 16  # sides of matrices that multiply in 8 bits


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """What stands in containers beside others of its class: the innermost such modules, in the
    order in which `model` holds them. A block has layers within it and a class of its own."""
    found = {
        id(child): child
        for container in model.modules()
        if isinstance(container, CONTAINERS)
        for child in container.children()
        if may_be_block(child)
    }
    count = Counter(kind_of(child) for child in found.values())
    repeated = {key for key, child in found.items() if count[kind_of(child)] > 1}
    return [
        child
        for child in model.modules()
        if id(child) in repeated
        and not any(id(inner) in repeated for inner in child.modules() if inner is not child)
    ]


def may_be_block(module: nn.Module) -> bool:
    is_own = not type(module).__module__.startswith(("torch.nn.", "torch.jit."))
    is_own = is_own and not isinstance(module, LoraLinear)
    has_layers = any(next(c.parameters(), None) is not None for c in module.children())
    return isinstance(module, TORCH_BLOCKS) or (is_own and has_layers)


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Its class, before it was made one that recomputes itself."""
    kind: type[nn.Module] = vars(type(module)).get("kind_recomputed", type(module))
    return kind


def stages_of(model: nn.Module) -> list[nn.Module]:
    """Of a Swin, which holds them as `layers`."""
    return list(model.layers)  # type: ignore[arg-type]


def checkpoint_model(model: nn.Module, how: str, blocks: Sequence[nn.Module] | None = None) -> None:
    """Checkpoints `model` in place: `how` is a setting's. `blocks` are those that its author named;
    else each library's own switch is turned on, and the repeated blocks that none reaches are
    wrapped. Raises ValueError where there is nothing of the kind."""
    kind, _, part = how.partition(":")
    if kind == "none":
        return
    switched: list[nn.Module] = []
    if kind == "stages":
        stages = stages_of(model)
        chosen = [stages[int(number)] for number in part.split(",")] if part else stages
    elif how == "blocks" and blocks is None:
        switched = list(switch_on(model))
        reached = {id(inner) for outer in switched for inner in outer.modules()}
        found = repeated_blocks(model)
        chosen = [block for block in found if reached.isdisjoint(map(id, block.modules()))]
    else:
        chosen = list(repeated_blocks(model) if blocks is None else blocks)
        if part:
            every = part.removeprefix("every-")
            chosen = chosen[: int(part)] if part == every else chosen[:: int(every)]
    if not switched and not chosen:
        raise ValueError("no repeated blocks were found, and no switch of a library")
    for module in chosen:
        recompute(module, kind == "selective")
    for inner in model.modules():  # a forward that is run again would append to its cache again
        if hasattr(getattr(inner, "config", None), "use_cache"):
            inner.config.use_cache = False  # type: ignore[union-attr]


def switch_on(module: Any) -> Iterator[nn.Module]:
    """Turns on the outermost switches within `module`; yields the modules that have them."""
    calls: dict[str, tuple[Any, ...]] = {
        "set_grad_checkpointing": (True,),  # timm
        "activation_checkpointing_enable": ({"use_reentrant": False},),  # transformers
        "gradient_checkpointing_enable": ({"use_reentrant": False},),  # transformers before that
        "enable_gradient_checkpointing": (),  # diffusers
    }
    try:
        if isinstance(getattr(module, "use_checkpoint", None), bool):  # the authors' Swin
            module.use_checkpoint = True
        else:
            name = next(name for name in calls if hasattr(module, name))
            getattr(module, name)(*calls[name])
    except (StopIteration, AssertionError, NotImplementedError, ValueError):  # none, or it refuses
        for child in module.children():
            yield from switch_on(child)
        return
    yield module


def recompute(module: Any, selective: bool = False) -> None:
    """From here on `module` keeps only its inputs and computes its inside again in backward; with
    `selective` it keeps the results of matrix products and attention too. Only its class changes:
    names in the state dict stay, and a copy recomputes itself."""
    if selective:  # what is kept must not change: a ReLU makes a new tensor from here on
        for inner in module.modules():
            if getattr(inner, "inplace", False):
                inner.inplace = False
    kind: Any = type(module)
    module.__class__ = recomputed(kind, selective)


@cache
def recomputed(kind: Any, selective: bool) -> type[nn.Module]:
    """One class for all modules of a kind, so that like modules stay alike to a compiler."""
    how: dict[str, Any] = {"context_fn": keep} if selective else {}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kind.forward, self, *args, use_reentrant=False, **how, **kwargs)

    made = {"forward": forward, "kind_recomputed": kind}
    return type(f"Recomputed{kind.__name__}", (kind,), made)


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
    """What one recomputed call keeps of its forward. Attention with dropout is not kept: a kernel
    that is passed over draws no random numbers, and what is drawn after it would not be what the
    forward drew. What is kept must not change: torch does not see that behind `@` of more than two
    dimensions (an unsafe view), and computes other gradients there (2.13)."""

    def __init__(self) -> None:
        self.storages: set[int] = set()

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        schema = getattr(operation, "_schema", None)
        is_product = str(operation) in KEPT_OPERATIONS
        if schema is None or not (is_product or schema.is_mutable):
            return CheckpointPolicy.PREFER_RECOMPUTE
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        written = [given.get(a.name) for a in schema.arguments if a.is_write]
        if not self.storages.isdisjoint(storages_of(written)):
            raise RuntimeError(
                f"selective checkpointing keeps the results of matrix products, and {operation} "
                "writes into one: checkpoint whole blocks, or write that result anew"
            )
        if not is_product or given.get("dropout_p"):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.storages |= storages_of(getattr(context, "op_output", None))
        return CheckpointPolicy.MUST_SAVE


def storages_of(values: Any) -> set[int]:
    tensors = (value for value in tree_leaves(values) if isinstance(value, Tensor))
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def keep() -> Any:
    """The two contexts of `checkpoint(..., context_fn=keep)`."""
    return create_selective_checkpoint_contexts(Keep())


class LoraLinear(nn.Module):
    """A linear layer as it was, plus a trained product of rank r: x A^T B^T. `lora_a` is [r, in]
    and `lora_b` [out, r], which begins at zero (LoRA, arXiv 2106.09685, with alpha = r)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        like = base.weight
        self.lora_a = nn.Parameter(like.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(like.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        scaling = 1.0  # alpha / r, by which peft multiplies too: a kernel and a tensor
        return y + F.linear(F.linear(x, self.lora_a), self.lora_b) * scaling


def freeze_and_adapt(model: nn.Module, frozen: str, adapted: str, rank: int) -> None:
    """Trains no weight whose name begins with the pattern `frozen`, and puts an adapter of `rank`
    in the place of each linear layer whose whole name matches `adapted`; "" and 0 are none."""
    for name, parameter in model.named_parameters():
        if frozen and re.match(frozen, name):
            parameter.requires_grad_(False)
    for name, layer in list(model.named_modules()) if rank else ():
        if isinstance(layer, nn.Linear) and re.fullmatch(adapted, name):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, LoraLinear(layer, rank))


def use_float8(model: nn.Module) -> None:
    """Puts torchao's Float8Linear in the place of each linear layer that may multiply in 8 bits, by
    torchao's default recipe: one scale a tensor, found anew each time. Weights stay as they are."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=multiplies_in_8_bits)


def multiplies_in_8_bits(layer: nn.Module, name: str = "") -> bool:
    sides = layer.weight.shape if isinstance(layer, nn.Linear) else (0,)
    return min(sides) >= FLOAT8_LEAST and all(side % FLOAT8_MULTIPLE == 0 for side in sides)


def lay_channels_last(model: nn.Module) -> None:
    """Weights and buffers; of clips weights alone, by `channels_last_3d`, which `to` refuses."""
    if all(parameter.dim() != 5 for parameter in model.parameters()):
        to: Any = model.to  # whose stub has the memory format alone from torch 2.15 on
        to(memory_format=torch.channels_last)
        return
    for parameter in model.parameters():
        if (wanted := FORMATS.get(parameter.dim())) is not None:
            parameter.data = parameter.data.contiguous(memory_format=wanted)


def compile_blocks(blocks: Sequence[nn.Module], how: dict[str, Any]) -> None:
    """Compiles each block by itself, in place: like ones share a graph. torch counts the graphs of
    all blocks together, those of validation and of its last, smaller batch too; beyond its limit it
    runs what is new eagerly. `how` are the arguments of `torch.compile`."""
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 3 * len(blocks) + 2)
    for block in blocks:
        block.compile(**how)


def shard(
    model: nn.Module, blocks: Iterable[nn.Module], device_type: str, shape: tuple[int, ...],
    reshard: bool,
) -> None:  # fmt: skip
    """FSDP2, in place: each of `blocks` is a unit, and the rest is the root's. `shape` are the
    devices of one copy of the weights, before them the copies where there are several."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():  # gloo sums, and takes no averages
        if isinstance(module, FSDPModule) and device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Gives back what is gathered of the weights of all units."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[Any, Any]:
    """Of sharded weights: what a checkpoint holds of them and of their optimizer, on the host."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(model, optimizers, options=whole)


def restore_whole(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], state: dict[str, Any]
) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    set_state_dict(model, optimizers, options=whole, **parts)


def share_of(whole: Tensor, like: Any) -> Tensor:
    """What this rank holds of a whole tensor that is sharded as `like` is."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements)


class Offloaded:
    """A storage's elements, flat: in pinned memory of the host, and from their first use in
    backward on the device again, until the last tensor that was saved of them is released."""

    def __init__(self, flat: Tensor) -> None:
        self.device = flat.device
        self.flat = torch.empty_like(flat, device="cpu", pin_memory=True)
        self.flat.copy_(flat, non_blocking=True)

    def back(self) -> Tensor:
        if is_on_host(self.flat):
            self.flat = self.flat.to(self.device, non_blocking=True)
        return self.flat


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def offload_activations(kept: Iterable[Tensor]) -> saved_tensors_hooks:
    """A context for forward and loss, in which what backward needs goes to the host. Unlike torch's
    `save_on_cpu` each storage moves once each way; what shares one with `kept` stays, and so do
    scalars, tensors of the host (all of them, on a CPU) and those without a storage of their own.
    """
    stay = storages_of(list(kept))
    moved: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[Any, weakref.ref[Offloaded]]]
    moved = weakref.WeakKeyDictionary()

    def pack(tensor: Tensor) -> Any:
        plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
        if tensor.dim() == 0 or is_on_host(tensor) or not plain:
            return tensor.detach()
        storage = tensor.untyped_storage()
        if storage._cdata in stay:
            return tensor.detach()
        content = tensor._version, tensor.dtype
        before, known = moved.get(storage, (None, None))
        found = known() if known is not None and before == content else None
        if found is None:
            num_elements = storage.nbytes() // tensor.element_size()
            found = Offloaded(tensor.detach().as_strided((num_elements,), (1,), 0))
            moved[storage] = content, weakref.ref(found)
        return found, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        found, size, stride, offset = packed
        view: Tensor = found.back().as_strided(size, stride, offset)
        return view

    return saved_tensors_hooks(pack, unpack)
