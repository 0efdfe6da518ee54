"""Tensors that have a shape, strides and a dtype, but no data; the device they live on.

A storage lives as long as Python holds a reference to it: its birth and death are the ledger's
events. So a module transcribed line by line from PyTorch has PyTorch's lifetimes (CPython
drops a name when its frame ends, and a call's arguments live as long as the call).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from sys import getrefcount
from typing import TYPE_CHECKING, Any

from planner.ledger.ledger import (
    Allocated,
    Category,
    Computed,
    Emptied,
    Event,
    Freed,
    Marked,
    OperationKind,
    Scratch,
    Tagged,
)

if TYPE_CHECKING:
    from weakref import ReferenceType

    from planner.step.autograd import AccumulateGrad, Node
    from planner.step.engine import Autocast, KeptResults


_new: Any = tuple.__new__  # a NamedTuple's own takes three times as long
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "uint8": 1, "bool": 1,
}  # fmt: skip
FLOATING = frozenset({"float64", "float32", "bfloat16", "float16"})

PackHook = Callable[["Tensor"], Any]
UnpackHook = Callable[[Any], "Tensor"]


class Device:
    """Where tensors live: writes down every allocation, release and operation.

    It also carries what PyTorch keeps per thread or module: whether gradients are recorded and
    modules are training, the autocast in force, the hooks for saved tensors and the module being
    run (`scope`).
    `in_place_sums` is how eager PyTorch adds gradients up where it may; under fake tensors it
    never does, so a comparison with one turns it off.
    `float_dtype` is what parameters and floating buffers are made in; `channels_last` whether
    images, parameters and buffers of four dimensions are laid out that way.
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
        # What the checkpointed call that is running keeps, where it is a selective one.
        self.kept_results: KeptResults | None = None
        # Told of each parameter whose gradient is ready.
        self.on_gradient: Callable[[GradientCell], None] | None = None
        # Of the weights that had none: the first and the last of the events that made the gradient
        # theirs, and what comes instead where there is one. None where nobody asks, or nobody knows
        # when the storage of one would die.
        self.first_gradients: list[tuple[int, int, list[Event]]] | None = None
        # The convolutions that cuDNN has tried its algorithms for, where it does.
        self.tried_convolutions: set[object] | None = None
        self.offloads = False  # some saved tensors are on the host, until a node needs them
        self.next_sequence = 0
        self.num_storages = 0

    def dense_strides(self, shape: Shape) -> Shape:
        """Of a module's parameter or buffer, and of images, once moved to the device."""
        return channels_last_strides(shape) if self.channels_last else contiguous_strides(shape)

    def allocate(self, num_bytes: int, label: str) -> int:
        self.num_storages += 1
        made = self.num_storages, num_bytes, label, self.scope, ""
        self.events.append(_new(Allocated, made))
        return self.num_storages

    def take(self, law: str, sizes: tuple[int, ...], label: str) -> TakenScratch:
        """What a kernel asks for beside its results, until it is dropped."""
        self.num_storages += 1
        self.events.append(_new(Scratch, (self.num_storages, law, sizes, label, self.scope)))
        return TakenScratch(self, self.num_storages)

    def try_convolution(self, *key: object) -> None:
        """cuDNN tries all algorithms for a convolution that it meets for the first time; torch then
        empties the cache (aten/src/ATen/native/cudnn/Conv_v8.cpp, get_plans_from_find)."""
        if self.tried_convolutions is not None and key not in self.tried_convolutions:
            self.tried_convolutions.add(key)
            self.events.append(Emptied(self.scope))

    def release(self, storage: int) -> None:
        self.events.append(_new(Freed, (storage,)))

    def tag(self, storage: int, category: Category, weight: int = 0) -> None:
        self.events.append(_new(Tagged, (storage, category, weight)))

    def mark(self, phase: str, step: int) -> None:
        self.events.append(Marked(phase, step))

    def compute(
        self,
        name: str,
        kind: OperationKind,
        dtype: str,
        flops: int,
        num_bytes: int,
        kernels: int = 1,
    ) -> None:
        """An operation ran."""
        done = name, kind, dtype, flops, num_bytes, kernels, self.scope
        self.events.append(_new(Computed, done))

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """`torch.no_grad()`."""
        before, self.grad_enabled = self.grad_enabled, False
        try:
            yield
        finally:
            self.grad_enabled = before


class Storage:
    """Bytes on a device, from the first reference to the last.

    `category` is fixed for parameters, buffers, gradients and optimizer state; a storage without
    one is an activation while something saved it for backward (`holds`), else a temporary.
    """

    __slots__ = ("category", "device", "holds", "ident", "num_bytes")

    def __init__(self, device: Device, num_bytes: int, label: str) -> None:
        self.device = device
        self.num_bytes = num_bytes
        self.holds = 0
        self.category: Category | None = None
        self.ident = device.allocate(num_bytes, label)

    def __del__(self) -> None:
        self.device.release(self.ident)

    def assign(self, category: Category, weight: int = 0) -> None:
        """From now on these bytes are parameters, gradients of the storage `weight` …"""
        if self.category != category:
            self.category = category
            self.device.tag(self.ident, category, weight)

    def hold(self) -> None:
        """Something saved this storage for backward."""
        self.holds += 1
        if self.holds == 1 and self.category is None:
            self.device.tag(self.ident, "activations")

    def let_go(self) -> None:
        self.holds -= 1
        if self.holds == 0 and self.category is None:
            self.device.tag(self.ident, "temporaries")


class TakenScratch:
    """Scratch of a kernel that runs."""

    __slots__ = ("device", "ident")

    def __init__(self, device: Device, ident: int) -> None:
        self.device = device
        self.ident = ident

    def __del__(self) -> None:
        self.device.release(self.ident)


class Tensor:
    """A view of a storage: shape, strides in elements, dtype; and where its gradient goes.

    `node` is `grad_fn` (None for a leaf) and `slot` which of its outputs this is; `base` the tensor
    that this one is a view of.
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
    def num_bytes(self) -> int:
        """Bytes its elements take (an expanded view counts them once per index)."""
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
    """Bytes of a dense tensor."""
    return prod(shape) * DTYPE_BYTES[dtype]


def empty(
    device: Device, shape: Shape, dtype: str, label: str, strides: Shape | None = None
) -> Tensor:
    """A new storage just large enough for a dense tensor of `shape`."""
    storage = Storage(device, num_bytes(shape, dtype), label)
    return Tensor(storage, shape, strides or contiguous_strides(shape), dtype)


def take_bytes(device: Device, num_bytes: int, label: str) -> TakenScratch:
    """Scratch that is as large on every device."""
    return device.take("bytes", (num_bytes,), label)


class GradientCell:
    """Where a leaf's gradient is kept. Apart from the leaf, so that nothing forms a cycle.

    Only a parameter's gradient counts as one, and its storage is `weight`: the leaf that stands for
    a checkpoint's input has a cell too.
    """

    __slots__ = ("accumulator", "grad", "weight")

    def __init__(self, weight: int = 0) -> None:
        self.weight = weight
        self.grad: Tensor | None = None
        self.accumulator: ReferenceType[AccumulateGrad] | None = None


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


# Python's own way of calling functions, which lifetimes on shapes rest on.
#
# A storage dies with its last reference, so it matters who holds an argument during a call:
# CPython moves it into the called frame, and the caller keeps none. `torch.compile` puts an
# evaluator of its own in the interpreter (PEP 523), and then the caller keeps its arguments until
# the call returns (CPython's `CALL` makes a frame in place only where no such evaluator is set).
# It is gone again after each compiled call, but stays where a thread ended within one (seen with
# torch 2.13).


@contextmanager
def plain_calls() -> Iterator[None]:
    """Calls as CPython makes them by itself, whatever evaluates frames outside of this block."""
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
    own = ctypes.cast(api._PyEval_EvalFrameDefault, ctypes.c_void_p)
    api._PyInterpreterState_SetEvalFrameFunc(interpreter, own)
    try:
        yield
    finally:
        api._PyInterpreterState_SetEvalFrameFunc(interpreter, evaluator)


def _callers_keep_arguments() -> bool:
    """Whether an argument has more references than the callee's name and getrefcount's own."""
    return _count_references(object()) > 2


def _count_references(argument: object) -> int:
    return getrefcount(argument)


# How PyTorch lays tensors out: strides in elements, and when a view needs no copy.

Shape = tuple[int, ...]
NUM_KEPT = 1 << 10  # answers: a step has few shapes, and asks of each many times


@lru_cache(NUM_KEPT)
def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides of `shape`, as `torch.empty(shape).stride()` has them."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def channels_last_strides(shape: Shape) -> Shape:
    """Strides of [B, C, H, W] laid out as [B, H, W, C]; row-major for any other rank."""
    if len(shape) != 4:
        return contiguous_strides(shape)
    _, channels, height, width = shape
    return (channels * height * width, 1, width * channels, channels)


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """`tensor.is_contiguous()`: row-major, dimensions of size 1 excused."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@lru_cache(NUM_KEPT)
def is_dense(shape: Shape, strides: Shape) -> bool:
    """`is_non_overlapping_and_dense()`: some permutation of the dimensions is row-major."""
    expected = 1
    for stride, size in sorted((st, s) for st, s in zip(strides, shape, strict=True) if s != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def preserved_strides(shape: Shape, strides: Shape) -> Shape:
    """Strides of `empty_like(tensor)`: its own when dense, else dense in the same order."""
    if is_dense(shape, strides):
        return strides
    return elementwise_strides(shape, [(shape, strides)])


def elementwise_strides(shape: Shape, operands: Sequence[tuple[Shape, Shape]]) -> Shape:
    """Strides of a new output of an elementwise operation (TensorIterator's rule).

    `operands` are the (shape, strides) of the inputs, broadcast to `shape`. The output is dense and
    its dimensions are ordered as the inputs' strides order them, ties going to the first input.
    """
    same = [(s, st) for s, st in operands if s == shape]
    if len(same) == len(operands):
        if all(is_contiguous(s, st) for s, st in operands):
            return contiguous_strides(shape)
        first = operands[0][1]
        if all(st == first for _, st in operands) and is_dense(shape, first):
            return first
    if not shape:
        return ()
    aligned = [_broadcast_strides(shape, s, st) for s, st in operands]
    order = list(range(len(shape) - 1, -1, -1))
    for i in range(1, len(order)):
        position = i
        for j in range(i - 1, -1, -1):
            verdict = _compare(shape, aligned, order[j], order[position])
            if verdict > 0:
                order[j], order[position] = order[position], order[j]
                position = j
            elif verdict < 0:
                break
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _broadcast_strides(shape: Shape, own: Shape, strides: Shape) -> Shape:
    lead = len(shape) - len(own)
    return (0,) * lead + tuple(
        0 if size == 1 and shape[lead + i] != 1 else strides[i] for i, size in enumerate(own)
    )


def _compare(shape: Shape, operands: Sequence[Shape], inner: int, outer: int) -> int:
    """Whether the dimension taken for inner belongs outside the other (1), inside (-1), or 0."""
    for strides in operands:
        a, b = strides[inner], strides[outer]
        if a == 0 or b == 0:
            continue
        if a < b:
            return -1
        if a > b:
            return 1
        if shape[inner] > shape[outer]:
            return 1
    return 0


@lru_cache(NUM_KEPT)
def view_strides(shape: Shape, strides: Shape, target: Shape) -> Shape | None:
    """Strides of `tensor.view(target)`, or None where only a copy has that shape."""
    if not shape:
        return (1,) * len(target)
    if 0 in shape:
        return contiguous_strides(target)
    result = [0] * len(target)
    view_dim = len(target) - 1
    chunk_base = strides[-1]
    tensor_numel = view_numel = 1
    for dim in range(len(shape) - 1, -1, -1):
        tensor_numel *= shape[dim]
        ends_chunk = dim == 0 or (
            shape[dim - 1] != 1 and strides[dim - 1] != tensor_numel * chunk_base
        )
        if not ends_chunk:
            continue
        while view_dim >= 0 and (view_numel < tensor_numel or target[view_dim] == 1):
            result[view_dim] = view_numel * chunk_base
            view_numel *= target[view_dim]
            view_dim -= 1
        if view_numel != tensor_numel:
            return None
        if dim > 0:
            chunk_base = strides[dim - 1]
            tensor_numel = view_numel = 1
    return tuple(result) if view_dim == -1 else None


def resolve_shape(numel: int, shape: Sequence[int]) -> Shape:
    """A shape with its one -1 replaced, as `view` and `reshape` take it."""
    if -1 not in shape:
        return tuple(shape)
    known = prod(s for s in shape if s != -1)
    return tuple(numel // known if s == -1 else s for s in shape)


def broadcast_shapes(a: Shape, b: Shape) -> Shape:
    """The shape two operands broadcast to."""
    if a == b:
        return a
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    tail = tuple(x if y == 1 else y for x, y in zip(a[lead:], b, strict=True))
    return a[:lead] + tail
