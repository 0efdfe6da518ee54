"""Tensors that have a shape, strides and a dtype, but no data; the device that they live on, and
the nodes of the graph that autograd records of them.

A storage lives as long as Python holds a reference to it: its allocation and its release are events
of the ledger. So a module transcribed line by line from PyTorch has PyTorch's lifetimes (CPython
drops a name when its frame ends, and a call's arguments live as long as the call).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from sys import getrefcount
from typing import Any
from weakref import ReferenceType

from planner.core.schema.record import Phase
from planner.ledger.ledger import (
    Allocated,
    CacheFreed,
    Category,
    Computed,
    Event,
    Freed,
    OperationKind,
    PhaseEnded,
    Scratch,
    Tagged,
)
from planner.step.layout import Shape, channels_last_strides, contiguous_strides, is_contiguous

_new_event: Any = tuple.__new__  # a NamedTuple's own takes three times as long
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "uint8": 1, "bool": 1,
}  # fmt: skip
FLOATING = frozenset({"float64", "float32", "bfloat16", "float16"})

PackHook = Callable[["Tensor"], Any]
UnpackHook = Callable[[Any], "Tensor"]


class Device:
    """The device that tensors live on: it records every allocation, release and operation.

    It also has the state that PyTorch keeps per thread or module: whether gradients are recorded
    and modules are training, the current autocast, the hooks for saved tensors and the path of the
    running module (`scope`).
    `in_place_sums`: eager PyTorch adds up gradients in place where it may. Fake tensors never do,
    so that a comparison with them turns it off.
    `float_dtype` is the dtype of parameters and floating buffers. With `channels_last` images,
    parameters and buffers of four dimensions are laid out that way.
    """

    channels_last = False

    def __init__(self, in_place_sums: bool = True, float_dtype: str = "float32") -> None:
        self.float_dtype = float_dtype
        self.events: list[Event] = []
        self.in_place_sums = in_place_sums
        self.grad_enabled = True
        self.training = True
        self.autocast: Autocast | None = None
        self.saved_tensor_hooks: list[tuple[PackHook, UnpackHook]] = []
        self.scope = ""
        # Runs a checkpointed function in place of `checkpoint`, where a graph is recorded.
        self.checkpoint_region: Callable[[Callable[..., Any], tuple[Any, ...]], Any] | None = None
        # The results that the running checkpointed call keeps, if it is a selective one.
        self.kept_results: KeptResults | None = None
        # Called with each parameter whose gradient is ready.
        self.on_gradient: Callable[[GradientCell], None] | None = None
        # For each weight that had no gradient: the range of events that gave it one, and the events
        # in their place for a weight that has one. None where these are not recorded, or where a
        # storage would be released at an unknown time.
        self.first_gradients: list[tuple[int, int, list[Event]]] | None = None
        # The convolutions for which cuDNN has tried its algorithms; None: it tries none.
        self.tried_convolutions: set[object] | None = None
        self.offloads = False  # some saved tensors are on the host, until a node needs them
        self.next_sequence = 0
        self.num_storages = 0

    def dense_strides(self, shape: Shape) -> Shape:
        """The strides of parameters, buffers and images, once they are moved to the device."""
        return channels_last_strides(shape) if self.channels_last else contiguous_strides(shape)

    def allocate(self, num_bytes: int, label: str) -> int:
        self.num_storages += 1
        fields = self.num_storages, num_bytes, label, self.scope, ""
        self.events.append(_new_event(Allocated, fields))
        return self.num_storages

    def take_scratch(self, law: str, sizes: tuple[int, ...], label: str) -> LiveScratch:
        """The scratch of a kernel, beside its results. It is released with the last reference."""
        self.num_storages += 1
        self.events.append(_new_event(Scratch, (self.num_storages, law, sizes, label, self.scope)))
        return LiveScratch(self, self.num_storages)

    def try_convolution(self, *key: object) -> None:
        """cuDNN tries all algorithms at the first call of a convolution; torch then empties the
        cache (aten/src/ATen/native/cudnn/Conv_v8.cpp, get_plans_from_find)."""
        if self.tried_convolutions is not None and key not in self.tried_convolutions:
            self.tried_convolutions.add(key)
            self.events.append(CacheFreed(self.scope))

    def release(self, storage: int) -> None:
        self.events.append(_new_event(Freed, (storage,)))

    def tag(self, storage: int, category: Category, weight: int = 0) -> None:
        self.events.append(_new_event(Tagged, (storage, category, weight)))

    def mark(self, phase: Phase, step: int) -> None:
        self.events.append(PhaseEnded(phase, step))

    def compute(
        self,
        name: str,
        kind: OperationKind,
        dtype: str,
        flops: int,
        num_bytes: int,
        kernels: int = 1,
    ) -> None:
        """Records that an operation runs."""
        fields = name, kind, dtype, flops, num_bytes, kernels, self.scope
        self.events.append(_new_event(Computed, fields))

    def compute_pointwise(self, name: str, output: Tensor, num_inputs: int) -> None:
        """Records one kernel that reads `num_inputs` tensors of the output's size and writes it."""
        num_bytes = output.num_bytes * (num_inputs + 1)
        self.compute(name, "pointwise", output.dtype, output.numel, num_bytes)

    def keep_results(self, compute: Callable[[], Results]) -> Results:
        """The results of `compute`, which a selective checkpointed call keeps."""
        return compute() if self.kept_results is None else self.kept_results.keep(compute)

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """`torch.no_grad()`."""
        before, self.grad_enabled = self.grad_enabled, False
        try:
            yield
        finally:
            self.grad_enabled = before


class Storage:
    """Bytes on a device, allocated with the first reference and released with the last.

    `category` is set for parameters, buffers, gradients and optimizer state. A storage without one
    is an activation while it is saved for backward (`num_holds` times), and else a temporary.
    """

    __slots__ = ("category", "device", "ident", "num_bytes", "num_holds")

    def __init__(self, device: Device, num_bytes: int, label: str) -> None:
        self.device = device
        self.num_bytes = num_bytes
        self.num_holds = 0
        self.category: Category | None = None
        self.ident = device.allocate(num_bytes, label)

    def __del__(self) -> None:
        self.device.release(self.ident)

    def assign(self, category: Category, weight: int = 0) -> None:
        """Sets the category, from now on: parameters, gradients of the storage `weight` …"""
        if self.category != category:
            self.category = category
            self.device.tag(self.ident, category, weight)

    def hold(self) -> None:
        """Counts one more saved tensor of this storage."""
        self.num_holds += 1
        if self.num_holds == 1 and self.category is None:
            self.device.tag(self.ident, "activations")

    def let_go(self) -> None:
        """Counts one saved tensor less."""
        self.num_holds -= 1
        if self.num_holds == 0 and self.category is None:
            self.device.tag(self.ident, "temporaries")


class LiveScratch:
    """The scratch of a running kernel."""

    __slots__ = ("device", "ident")

    def __init__(self, device: Device, ident: int) -> None:
        self.device = device
        self.ident = ident

    def __del__(self) -> None:
        self.device.release(self.ident)


class Tensor:
    """A view of a storage: shape, strides in elements, dtype; and its place in the graph.

    `node` is `grad_fn` (None for a leaf), and this tensor is the node's output number `slot`. A
    view keeps its `base`, the tensor that it is a view of.
    """

    __slots__ = (
        "__weakref__", "base", "dtype", "node", "requires_grad", "shape", "slot", "storage",
        "strides",
    )  # fmt: skip

    def __init__(self, storage: Storage, shape: Shape, strides: Shape, dtype: str) -> None:
        self.storage = storage
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.requires_grad = False
        self.base: Tensor | None = None
        self.node: Node | None = None
        self.slot = 0

    @property
    def device(self) -> Device:
        return self.storage.device

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """The bytes of all elements (an expanded view counts an element once per index)."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        return is_contiguous(self.shape, self.strides)

    @property
    def is_floating(self) -> bool:
        return self.dtype in FLOATING

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def detach(self) -> Tensor:
        """The same storage without history."""
        return Tensor(self.storage, self.shape, self.strides, self.dtype)

    def __repr__(self) -> str:
        return f"Tensor({list(self.shape)}, {self.dtype})"


def num_bytes(shape: Shape, dtype: str) -> int:
    """The bytes of a dense tensor."""
    return prod(shape) * DTYPE_BYTES[dtype]


def empty(
    device: Device, shape: Shape, dtype: str, label: str, strides: Shape | None = None
) -> Tensor:
    """`torch.empty(shape)`: a new dense tensor."""
    storage = Storage(device, num_bytes(shape, dtype), label)
    return Tensor(storage, shape, strides or contiguous_strides(shape), dtype)


def take_bytes(device: Device, num_bytes: int, label: str) -> LiveScratch:
    """Scratch of the same size on every device."""
    return device.take_scratch("bytes", (num_bytes,), label)


class GradientCell:
    """The place of a leaf's gradient. It is apart from the leaf, so that nothing forms a cycle.

    `weight` is a parameter's storage, or 0: the leaf that stands for a checkpoint's input has a
    cell too, and only a parameter's gradient is tagged as one.
    """

    __slots__ = ("accumulator", "grad", "weight")

    def __init__(self, weight: int = 0) -> None:
        self.weight = weight
        self.grad: Tensor | None = None
        self.accumulator: ReferenceType[Node] | None = None


class Parameter(Tensor):
    """A leaf that requires a gradient."""

    __slots__ = ("cell",)

    def __init__(self, device: Device, shape: Shape) -> None:
        dtype = device.float_dtype
        storage = Storage(device, num_bytes(shape, dtype), "parameter")
        super().__init__(storage, shape, device.dense_strides(shape), dtype)
        storage.assign("parameters")
        self.requires_grad = True
        self.cell = GradientCell(storage.ident)


# What autograd records: nodes, and the tensors that they save for backward.

Gradients = tuple[Tensor | None, ...]
Backward = Callable[["Node", "list[Tensor | None]"], Gradients]
Edge = tuple["Node", int]


class Saved:
    """A tensor saved for backward: itself, or what the innermost pack hook returned for it."""

    __slots__ = ("packed", "storage", "unpack_hook")

    def __init__(self, tensor: Tensor) -> None:
        hooks = tensor.storage.device.saved_tensor_hooks
        self.storage: Storage | None = None
        self.unpack_hook: Callable[[Any], Tensor] | None = None
        self.packed: Any = tensor.detach()
        if hooks:
            pack, self.unpack_hook = hooks[-1]
            self.packed = pack(self.packed)
        else:
            self.storage = tensor.storage
            tensor.storage.hold()

    def unpack(self) -> Tensor:
        if self.unpack_hook is not None:
            return self.unpack_hook(self.packed)
        alias: Tensor = self.packed.detach()
        return alias

    def release(self) -> None:
        self.packed = self.unpack_hook = None
        if self.storage is not None:
            self.storage.let_go()
            self.storage = None


class Node:
    """One step of backward: `run(node, gradients of its outputs) -> gradients of its inputs`."""

    __slots__ = (
        "__weakref__", "data", "edges", "metadata", "name", "run", "saved", "scope",
        "sequence",
    )  # fmt: skip

    def __init__(
        self,
        device: Device,
        name: str,
        edges: tuple[Edge | None, ...],
        run: Backward,
        data: Any = None,
    ) -> None:
        self.name = name
        self.edges = edges
        self.run = run
        self.data = data
        self.saved: list[Saved] = []
        self.metadata: list[tuple[Shape, str]] = []
        self.scope = device.scope
        self.sequence = device.next_sequence
        device.next_sequence += 1

    def needs(self, index: int) -> bool:
        """Whether input `index` needs a gradient (`should_compute_output`)."""
        return self.edges[index] is not None

    def save(self, tensors: Iterable[Tensor]) -> None:
        self.saved.extend([Saved(tensor) for tensor in tensors])

    def unpack(self, index: int) -> Tensor:
        return self.saved[index].unpack()

    def release(self) -> None:
        for saved in self.saved:
            saved.release()
        self.saved.clear()


class Autocast:
    """The low-precision dtype, and the cached casts of fp32 leaves, until the context ends."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.casts: dict[int, tuple[Parameter, Tensor]] = {}


# The results that selective checkpointing keeps, so that the recomputation need not compute them.
#
# torch/utils/checkpoint.py, `_CachingTorchDispatchMode` and `_CachedTorchDispatchMode`: forward
# stores the results of chosen operations, whether backward needs them or not. The recomputation
# takes each out again; results that it does not reach stay until the checkpointed call's frame
# dies.

Results = tuple[Tensor, ...]


class KeptResults:
    """The kept results of one checkpointed call, in the order in which they were computed."""

    __slots__ = ("_pending", "is_recomputing")

    def __init__(self) -> None:
        self._pending: deque[Results] = deque()
        self.is_recomputing = False

    def __del__(self) -> None:
        while self._pending:
            for tensor in self._pending.popleft():
                tensor.storage.let_go()

    def keep(self, compute: Callable[[], Results]) -> Results:
        """The results of `compute`: computed and kept, or, in the recomputation, taken out."""
        if not self.is_recomputing:
            results = compute()
            self._pending.append(tuple(result.detach() for result in results))
            for result in results:
                result.storage.hold()
            return results
        results = self._pending.popleft()
        for result in results:
            result.storage.let_go()
        return results


# How CPython calls functions, which the lifetimes on shapes rest on.
#
# A storage dies with its last reference, so it matters who holds an argument during a call.
# CPython moves it into the called frame, and the caller keeps no reference. `torch.compile` sets a
# frame evaluator in the interpreter (PEP 523); then the caller keeps its arguments until the call
# returns (CPython's `CALL` makes a frame in place only where no such evaluator is set). torch
# removes it after each compiled call, but it stays where a thread ended within one (seen with torch
# 2.13).


@contextmanager
def plain_calls() -> Iterator[None]:
    """CPython's default frame evaluator within this block, whichever is set outside."""
    if "torch" not in sys.modules or not _callers_keep_arguments():
        yield
        return
    import ctypes

    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    api._PyInterpreterState_GetEvalFrameFunc.restype = ctypes.c_void_p
    api._PyInterpreterState_GetEvalFrameFunc.argtypes = [ctypes.c_void_p]
    api._PyInterpreterState_SetEvalFrameFunc.restype = None
    api._PyInterpreterState_SetEvalFrameFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    interpreter = api.PyInterpreterState_Get()
    evaluator = api._PyInterpreterState_GetEvalFrameFunc(interpreter)
    default = ctypes.cast(api._PyEval_EvalFrameDefault, ctypes.c_void_p)
    api._PyInterpreterState_SetEvalFrameFunc(interpreter, default)
    try:
        yield
    finally:
        api._PyInterpreterState_SetEvalFrameFunc(interpreter, evaluator)


def _callers_keep_arguments() -> bool:
    """Whether an argument has more references than the callee's name and getrefcount's argument."""
    return _count_references(object()) > 2


def _count_references(argument: object) -> int:
    return getrefcount(argument)
