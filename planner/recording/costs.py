"""The work of an operation: what it computes and moves on a device. And of one rank of many, the
collectives that it sends, and where computation waits for them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from planner.core.schema import TrainSetting
from planner.core.schema.setting import Collective, Group
from planner.ledger.ledger import NO_KERNEL, Awaited, Computed, Event, Sent, operation_kind
from planner.training.tasks.contract import all_tensors

_WRITES_ONLY = {"copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_"}
# Kernels of one call where they are not 1: index_put with accumulate sorts its indices first, the
# gradients of LayerNorm's input and of its weight are apart, and so are those of a convolution's.
_KERNELS = {
    "index_put": 4, "index_put_": 4, "_index_put_impl_": 4, "native_layer_norm_backward": 2,
    "convolution_backward": 2, "_scaled_dot_product_efficient_attention_backward": 2,
    "_scaled_dot_product_flash_attention_backward": 3,
}  # fmt: skip
# aten/src/ATen/native/cuda/MultiTensorApply.cuh: tensors a launch by the number of lists, blocks a
# launch, elements a block.
_FOREACH_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_FOREACH_BLOCKS = 320
_FOREACH_CHUNK = 65536


def cost_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, path: str
) -> Computed | None:
    """The work of `func`, or None where it starts no kernel (views, empty tensors)."""
    name = func._overloadpacket.__name__
    if name in NO_KERNEL or func.is_view or name == "_unsafe_view":
        return None
    inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
    out = tensors_in(kwargs.get("out"))
    fresh = [t for t in outputs if not any(t is i for i in inputs)]
    written = fresh or out or _mutated(func, args)
    if not written:
        return None
    read = [] if name in _WRITES_ONLY else [t for t in inputs if not any(t is o for o in out)]
    if name == "copy_":
        read = [args[1]]
    return Computed(
        name=f"aten.{name}",
        kind="grouped conv" if _num_groups(name, args) > 1 else operation_kind(name),
        dtype=_dtype(inputs[:1] if name == "_scaled_mm" else written, inputs),
        flops=_flops(func, args, kwargs, result, written),
        num_bytes=sum(moved_bytes(t) for t in read) + sum(moved_bytes(t) for t in written),
        kernels=_kernels(name, args),
        path=path,
    )


def _num_groups(name: str, args: tuple[Any, ...]) -> int:
    """The groups of a convolution's channels; in a depthwise one each channel is a group."""
    at = {"convolution": 8, "_convolution": 8, "convolution_backward": 9}.get(name)
    return 1 if at is None or len(args) <= at else int(args[at])


def copy_cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> Computed:
    """The work of one of FSDP2's copies, which reads and writes all its tensors once."""
    tensors = tensors_in((args, kwargs))
    name = f"fsdp.{func._overloadpacket.__name__}"
    return Computed(name, "copy", _dtype(tensors, []), 0, sum(map(moved_bytes, tensors)), 1, path)


def transfer_cost(name: str, copied: Tensor, path: str) -> Computed:
    """The work of a copy between the device and the host: its bytes cross the link once."""
    return Computed(name, "transfer", _dtype([copied], []), 0, moved_bytes(copied), 1, path)


def _mutated(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that `func` writes to among its positional arguments."""
    described = zip(func._schema.arguments, args, strict=False)
    return tensors_in(
        [a for s, a in described if s.alias_info is not None and s.alias_info.is_write]
    )


def _dtype(written: Iterable[Tensor], inputs: Iterable[Tensor]) -> str:
    """The dtype of the first floating tensor written; a copy between dtypes counts as its result.
    Products of 8 bits write wider numbers, and run at the rate of what they read."""
    tensors = [*written, *inputs]
    floating = [t for t in tensors if t.is_floating_point()] or tensors
    return str(floating[0].dtype).removeprefix("torch.")


def _flops(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, written: list[Tensor]
) -> int:
    """FLOPs by the formulas below, else by those of torch.utils.flop_counter; where neither has
    one, one for each element written, and none for a copy."""
    packet = func._overloadpacket
    name = packet.__name__
    if name in _FORMULAS:
        return _FORMULAS[name](*args)
    if packet in flop_registry:
        try:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
        except AssertionError:  # of grouped queries, before torch 2.13
            # A backward multiplies five times where the forward does twice.
            is_back = "backward" in name
            flops = _attention_flops(*args[is_back : is_back + 3]) * (5 if is_back else 2) // 2
        return _causal_flops(func, args, kwargs, flops) if "attention" in name else flops
    if operation_kind(name) == "copy":
        return 0
    return sum(t.numel() for t in written)


def _convolution_backward_flops(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """The gradient of the input and that of the weight each cost what the forward does: every
    product `x * w -> y` of the forward is once `grad * w -> grad_x` and once `grad * x -> grad_w`.

    Each weight meets each position of the smaller side (the output; a transposed convolution's
    input) once an image, whatever the groups. `weight` is [out, in / groups, *kernel], or
    transposed [in, out / groups, *kernel].
    """
    # convolution_backward(grad, x, weight, bias_sizes, stride, padding, dilation, transposed,
    #                      output_padding, groups, output_mask)
    transposed, output_mask = rest[4], rest[7]
    positions = int(math.prod((x if transposed else grad).shape[2:]))
    forward = 2 * int(grad.shape[0]) * positions * int(weight.numel())
    return forward * (bool(output_mask[0]) + bool(output_mask[1]))


def _product_flops(a: Tensor, b: Tensor) -> int:
    """`a @ b` (a dot product, a matrix and a vector, matrices, or batches of them): each element of
    `a` meets each column of `b`."""
    columns = int(b.shape[-1]) if b.dim() > 1 else 1
    return 2 * int(a.numel()) * columns


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Each row of queries [B, heads, rows, width] meets each key, and its scores each value."""
    rows = math.prod(query.shape[:-1])
    return 2 * rows * int(key.shape[-2]) * int(query.shape[-1] + value.shape[-1])


def _grouped_flops(a: Tensor, b: Tensor, *_: Any) -> int:
    """Products of groups. Where an operand is a matrix, the groups' rows, columns or summed
    elements lie one after another in it; only where both are batches does each group have its own
    matrices.
    """
    groups = int(a.shape[0]) if a.dim() == b.dim() == 3 else 1
    return 2 * groups * int(a.shape[-2]) * int(a.shape[-1]) * int(b.shape[-1])


_FORMULAS: dict[str, Callable[..., int]] = {
    "convolution_backward": _convolution_backward_flops,
    # torch.utils.flop_counter has none for these.
    "dot": _product_flops,
    "vdot": _product_flops,
    "mv": _product_flops,
    "addmv": lambda _, a, b, *rest: _product_flops(a, b),
    "addbmm": lambda _, a, b, *rest: _product_flops(a, b),
    "_addmm_activation": lambda _, a, b, *rest: _product_flops(a, b),
    "_grouped_mm": _grouped_flops,
}


def _causal_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flops: int) -> int:
    """The FLOPs of a causal kernel, of `flops` over all scores. The kernel skips what lies beyond
    the diagonal, which the formulas of torch.utils.flop_counter count: row i sees keys 0 to i."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    if not named.get("is_causal"):
        return flops
    queries, keys = int(named["query"].shape[-2]), int(named["key"].shape[-2])
    seen = sum(min(row + 1, keys) for row in range(queries))
    return flops // (queries * keys) * seen


def moved_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor; of an expanded one those of its storage."""
    storage_bytes: int = tensor.untyped_storage().nbytes()
    return min(int(tensor.numel()) * int(tensor.element_size()), storage_bytes)


def _kernels(name: str, args: tuple[Any, ...]) -> int:
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    if lists and name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        blocks = sum(-(-int(t.numel()) // _FOREACH_CHUNK) for t in lists[0])
        tensors = _FOREACH_TENSORS[min(len(lists), max(_FOREACH_TENSORS))]
        return max(-(-len(lists[0]) // tensors), -(-blocks // _FOREACH_BLOCKS))
    return _KERNELS.get(name, 1)


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of an operation's arguments or results, with repetitions."""
    return list(all_tensors(tree))


COMPUTING = 0  # the address of the stream that computes
# Operations that send a collective: its kind, which argument is the whole array, and between which
# ranks it runs where shards are copied (hsdp).
SENDING: Mapping[str, tuple[Collective, int, Group]] = {
    "c10d::_allgather_base_": ("all_gather", 0, "shard"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, "shard"),
    "c10d::allreduce_": ("all_reduce", 0, "replicate"),
    "c10d::broadcast_": ("broadcast", 0, "replicate"),
    "_c10d_functional::all_reduce": ("all_reduce", 0, "shard"),
}


class Collectives:
    """Hears which stream waits for which, and gives `add` the events that follow for the stream
    that computes. A collective which that stream sent itself is awaited by the first operation that
    touches its bytes."""

    def __init__(self, setting: TrainSetting, add: Callable[[Event], None]) -> None:
        self.is_copied = setting.parallelism == "hsdp"
        self.add = add
        self.num_sent = 0
        self.last: dict[int, int] = {}  # stream: the last collective that it waits for
        self.awaited: set[int] = set()
        self.touched: dict[int, int] = {}  # address of a storage: the collective it is sent by
        # Streams that wait for all that is computed so far, and those that did as they sent.
        self.behind: set[int] = set()
        self.followed: set[int] = set()

    def hear(self, func: Any, args: tuple[Any, ...], path: str) -> None:
        """Hears an operation of several ranks."""
        name, stream = func._schema.name, torch.cuda.current_stream().cuda_stream
        if name == "_c10d_functional::wait_tensor":
            self._wait(stream, self.last.get(stream))
        if name not in SENDING:
            return
        collective, place, group = SENDING[name]
        whole: Tensor = tensors_in(args[place])[0]
        follows = stream == COMPUTING or stream in self.behind
        self.behind.discard(stream)
        (self.followed.add if follows else self.followed.discard)(stream)
        self.num_sent += 1
        self.last[stream] = self.num_sent
        if stream == COMPUTING:
            self.touched[whole.untyped_storage().data_ptr()] = self.num_sent
        dtype = str(whole.dtype).removeprefix("torch.")
        whose: Group = group if self.is_copied else "world"
        num_bytes = whole.numel() * whole.element_size()
        self.add(Sent(self.num_sent, collective, num_bytes, dtype, whose, follows, path))

    def touch(self, tensors: list[Tensor], is_beside: bool) -> None:
        """An operation is about to read or write these tensors on the stream that computes; or
        `is_beside` it, as DDP's hooks are: then whoever touches one of them later waits too."""
        if not self.touched:
            return
        places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        for handle in [self.touched[place] for place in places if place in self.touched]:
            if is_beside:
                self.touched |= dict.fromkeys(places, handle)
            else:
                self._wait(COMPUTING, handle)

    def end_backward(self) -> None:
        """Waits until all gradients are summed."""
        for handle in sorted(self.touched.values()):
            self._wait(COMPUTING, handle)
        self.touched.clear()

    def _wait(self, stream: int, handle: int | None) -> None:
        if handle is None or handle in self.awaited:
            return
        if stream == COMPUTING:
            self.awaited.add(handle)
            self.add(Awaited(handle))
        else:
            self.last[stream] = max(handle, self.last.get(stream, handle))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, the waits of streams and events are heard."""
        stream, event = torch.cuda.Stream, torch.cuda.Event
        record, wait, wait_stream = event.record, event.wait, stream.wait_stream

        def hear_record(this: Any, on: Any = None) -> Any:
            on = on if on is not None else torch.cuda.current_stream()
            this.collective = self.last.get(on.cuda_stream)
            return record(this, on)

        def hear_wait(this: Any, on: Any = None) -> None:
            on = on if on is not None else torch.cuda.current_stream()
            self._wait(on.cuda_stream, getattr(this, "collective", None))
            wait(this, on)

        def hear_wait_stream(this: Any, other: Any) -> None:
            wait_stream(this, other)
            waited = other.cuda_stream
            if this.cuda_stream != COMPUTING and (waited == COMPUTING or waited in self.followed):
                self.behind.add(this.cuda_stream)

        with (
            mock.patch.object(event, "record", hear_record),
            mock.patch.object(event, "wait", hear_wait),
            mock.patch.object(stream, "wait_stream", hear_wait_stream),
        ):
            yield
