# Written by 'planner emit', which replaces files that begin with this line.
"""What some settings do to any model, in place. `train.py` beside this file imports it.

Checkpointing of blocks and stages, selective checkpointing; frozen weights and adapters; products
in 8 bits and memory formats; blocks that are compiled or sharded one by one; activations in the
host's memory. Imports only torch (and torchao for 8 bits).
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
FLOAT8_MIN_SIDE, FLOAT8_MULTIPLE = 64, 16  # of the sides of matrices that multiply in 8 bits


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of `model`, in its own order: the innermost modules that are in a container and
    have the class of another one. A block contains layers, and its class is not one of torch's."""
    candidates = {
        id(child): child
        for container in model.modules()
        if isinstance(container, CONTAINERS)
        for child in container.children()
        if may_be_block(child)
    }
    counts = Counter(plain_class(child) for child in candidates.values())
    repeated = {key for key, child in candidates.items() if counts[plain_class(child)] > 1}
    return [
        child
        for child in model.modules()
        if id(child) in repeated
        and not any(id(inner) in repeated for inner in child.modules() if inner is not child)
    ]


def may_be_block(module: nn.Module) -> bool:
    is_own_class = not type(module).__module__.startswith(("torch.nn.", "torch.jit."))
    is_own_class = is_own_class and not isinstance(module, LoraLinear)
    has_layers = any(next(c.parameters(), None) is not None for c in module.children())
    return isinstance(module, TORCH_BLOCKS) or (is_own_class and has_layers)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before `recompute` changed it."""
    kind: type[nn.Module] = vars(type(module)).get("kind_recomputed", type(module))
    return kind


def checkpoint_model(
    model: nn.Module, mode: str, blocks: Sequence[nn.Module] | None = None
) -> None:
    """Checkpoint `model` in place; `mode` is the setting's `checkpointing`.

    `blocks` are those that its author named. Without them, the switches of its library are turned
    on, and the repeated blocks that no switch reaches are wrapped. Raises ValueError if there is
    nothing to checkpoint.
    """
    kind, _, selection = mode.partition(":")
    if kind == "none":
        return
    switched: list[nn.Module] = []
    if kind == "stages":
        stages = list(model.layers)  # type: ignore[arg-type]  # a Swin's
        chosen = [stages[int(number)] for number in selection.split(",")] if selection else stages
    elif mode == "blocks" and blocks is None:
        switched = list(turn_on_switches(model))
        reached = {id(inner) for outer in switched for inner in outer.modules()}
        repeated = repeated_blocks(model)
        chosen = [block for block in repeated if reached.isdisjoint(map(id, block.modules()))]
    else:
        chosen = list(repeated_blocks(model) if blocks is None else blocks)
        if selection:
            interval = selection.removeprefix("every-")
            chosen = chosen[: int(selection)] if selection == interval else chosen[:: int(interval)]
    if not switched and not chosen:
        raise ValueError("no repeated blocks were found, and no switch of a library")
    for module in chosen:
        recompute(module, kind == "selective")
    for inner in model.modules():  # a forward that runs again would append to its cache again
        if hasattr(getattr(inner, "config", None), "use_cache"):
            inner.config.use_cache = False  # type: ignore[union-attr]


def turn_on_switches(module: Any) -> Iterator[nn.Module]:
    """Turn on the outermost switches within `module`, and yield the modules that have them."""
    switches: dict[str, tuple[Any, ...]] = {
        "set_grad_checkpointing": (True,),  # timm
        "activation_checkpointing_enable": ({"use_reentrant": False},),  # transformers
        "gradient_checkpointing_enable": ({"use_reentrant": False},),  # older transformers
        "enable_gradient_checkpointing": (),  # diffusers
    }
    try:
        if isinstance(getattr(module, "use_checkpoint", None), bool):  # microsoft/Swin-Transformer
            module.use_checkpoint = True
        else:
            name = next(name for name in switches if hasattr(module, name))
            getattr(module, name)(*switches[name])
    except (StopIteration, AssertionError, NotImplementedError, ValueError):  # none, or it refused
        for child in module.children():
            yield from turn_on_switches(child)
        return
    yield module


def recompute(module: Any, selective: bool = False) -> None:
    """Make `module` keep only its inputs, and compute its inside again in backward. With
    `selective` it also keeps the results of matrix products and attention. Only the class of the
    module changes: the names in its state dict stay, and a copy of it recomputes too."""
    if selective:  # kept results must not change: from now on a ReLU makes a new tensor
        for inner in module.modules():
            if getattr(inner, "inplace", False):
                inner.inplace = False
    kind: Any = type(module)
    module.__class__ = recomputing_class(kind, selective)


@cache
def recomputing_class(kind: Any, selective: bool) -> type[nn.Module]:
    """The class of recomputing modules of one kind. It is cached: a compiler must see equal blocks
    as equal."""
    options: dict[str, Any] = {"context_fn": keep_contexts} if selective else {}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kind.forward, self, *args, use_reentrant=False, **options, **kwargs)

    attributes = {"forward": forward, "kind_recomputed": kind}
    return type(f"Recomputed{kind.__name__}", (kind,), attributes)


# The operations that cost most to compute again for each byte that their results take.
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


class KeepPolicy:
    """The policy of selective checkpointing, for one call: which results of forward to keep.

    Attention with dropout is not kept: a kernel that does not run again draws no random numbers,
    and all later draws would differ from those of forward. A kept result must not be written to:
    torch does not notice that behind `@` of more than two dimensions (an unsafe view), and computes
    wrong gradients there (2.13).
    """

    def __init__(self) -> None:
        self.storages: set[int] = set()

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        schema = getattr(operation, "_schema", None)
        is_product = str(operation) in KEPT_OPERATIONS
        if schema is None or not (is_product or schema.is_mutable):
            return CheckpointPolicy.PREFER_RECOMPUTE
        arguments = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        written = [arguments.get(a.name) for a in schema.arguments if a.is_write]
        if not self.storages.isdisjoint(storage_ids(written)):
            raise RuntimeError(
                f"selective checkpointing keeps the results of matrix products, and {operation} "
                "writes into one: checkpoint whole blocks, or write that result anew"
            )
        if not is_product or arguments.get("dropout_p"):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.storages |= storage_ids(getattr(context, "op_output", None))
        return CheckpointPolicy.MUST_SAVE


def storage_ids(values: Any) -> set[int]:
    tensors = (value for value in tree_leaves(values) if isinstance(value, Tensor))
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def keep_contexts() -> Any:
    """The two contexts of `checkpoint(..., context_fn=keep_contexts)`."""
    return create_selective_checkpoint_contexts(KeepPolicy())


class LoraLinear(nn.Module):
    """A linear layer plus a trained product of rank r: x A^T B^T. `lora_a` is [r, in], and `lora_b`
    is [out, r] and begins at zero (LoRA, arXiv 2106.09685, with alpha = r)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        weight = base.weight
        self.lora_a = nn.Parameter(weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        scaling = 1.0  # alpha / r. peft multiplies by it as well, which is a kernel and a tensor.
        return y + F.linear(F.linear(x, self.lora_a), self.lora_b) * scaling


def freeze_and_adapt(model: nn.Module, frozen: str, adapted: str, rank: int) -> None:
    """Freeze the weights whose names match the regex `frozen` at their start, and put an adapter of
    `rank` around each linear layer whose whole name matches `adapted`. "" and 0 change nothing."""
    for name, parameter in model.named_parameters():
        if frozen and re.match(frozen, name):
            parameter.requires_grad_(False)
    for name, layer in list(model.named_modules()) if rank else ():
        if isinstance(layer, nn.Linear) and re.fullmatch(adapted, name):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, LoraLinear(layer, rank))


def use_float8(model: nn.Module) -> None:
    """Replace each linear layer that may multiply in 8 bits by torchao's Float8Linear, with
    torchao's default recipe: one scale for a tensor, computed anew each time. The weights stay as
    they are."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=is_float8_layer)


def is_float8_layer(layer: nn.Module, name: str = "") -> bool:
    sides = layer.weight.shape if isinstance(layer, nn.Linear) else (0,)
    return min(sides) >= FLOAT8_MIN_SIDE and all(side % FLOAT8_MULTIPLE == 0 for side in sides)


def lay_channels_last(model: nn.Module) -> None:
    """Lay out weights and buffers channels last. In a model of clips only the weights change, to
    `channels_last_3d`, which `to` refuses."""
    if all(parameter.dim() != 5 for parameter in model.parameters()):
        move: Any = model.to  # its stub takes only a memory format from torch 2.15 on
        move(memory_format=torch.channels_last)
        return
    for parameter in model.parameters():
        if (memory_format := FORMATS.get(parameter.dim())) is not None:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)


def compile_blocks(blocks: Sequence[nn.Module], arguments: dict[str, Any]) -> None:
    """Compile each block by itself, in place; equal blocks share a graph. `arguments` are those of
    `torch.compile`. torch counts the graphs of all blocks together, also those of validation and of
    its last, smaller batch, and runs new code eagerly beyond its limit: so the limit is raised."""
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 3 * len(blocks) + 2)
    for block in blocks:
        block.compile(**arguments)


def shard(
    model: nn.Module, blocks: Iterable[nn.Module], device_type: str, shape: tuple[int, ...],
    reshard_after_forward: bool,
) -> None:  # fmt: skip
    """Shard `model` in place by FSDP2: each of `blocks` is a unit, and the root has the rest.
    `shape` is (devices of one copy of the weights,), or (copies, devices of one copy)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():  # gloo can sum, but not average
        if isinstance(module, FSDPModule) and device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)


def release_gathered(model: nn.Module) -> None:
    """Release the gathered weights of all units."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[Any, Any]:
    """The state dicts of sharded weights and their optimizers, gathered on the host."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(model, optimizers, options=options)


def scatter_state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], state: dict[str, Any]
) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    state_dicts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    set_state_dict(model, optimizers, options=options, **state_dicts)


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """This rank's shard of a whole tensor, sharded as `like` is."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements)


class Offloaded:
    """The elements of a storage, flat: in pinned memory of the host until backward first uses them,
    then on the device until the last tensor that was saved of the storage is released."""

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
    """A context for forward and loss that moves the tensors which backward needs to the host.

    Unlike torch's `save_on_cpu`, it moves each storage once in each direction. Tensors that share a
    storage with `kept` stay where they are, and so do scalars, tensors on the host (on a CPU, all
    of them) and tensors without a plain storage.
    """
    kept_storages = storage_ids(list(kept))
    offloaded: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[Any, weakref.ref[Offloaded]]]
    offloaded = weakref.WeakKeyDictionary()

    def pack(tensor: Tensor) -> Any:
        is_plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
        if tensor.dim() == 0 or is_on_host(tensor) or not is_plain:
            return tensor.detach()
        storage = tensor.untyped_storage()
        if storage._cdata in kept_storages:
            return tensor.detach()
        content = tensor._version, tensor.dtype
        last_content, reference = offloaded.get(storage, (None, None))
        entry = reference() if reference is not None and last_content == content else None
        if entry is None:
            num_elements = storage.nbytes() // tensor.element_size()
            entry = Offloaded(tensor.detach().as_strided((num_elements,), (1,), 0))
            offloaded[storage] = content, weakref.ref(entry)
        return entry, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        entry, size, stride, offset = packed
        view: Tensor = entry.back().as_strided(size, stride, offset)
        return view

    return saved_tensors_hooks(pack, unpack)
