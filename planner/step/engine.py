"""Backward on shapes: the graph that autograd recorded, run and freed; and what changes what is
saved for it: autocast, offloading, checkpointing.

The order and the lifetimes are those of PyTorch's engine (torch/csrc/autograd/engine.cpp,
input_buffer.cpp): nodes run by descending sequence number, gradients of leaves first; a node's
incoming gradients die when it returns, its saved tensors right after.
"""

import heapq
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from sys import getrefcount
from typing import Any

from planner.ledger.ledger import TO_DEVICE, TO_HOST
from planner.step.autograd import Gradients, Node, Saved, begin, finish, pointwise_cost
from planner.step.pointwise import add, sum_to, to_dtype
from planner.step.tensor import Device, GradientCell, Parameter, Shape, Storage, Tensor, is_dense


def backward(loss: Tensor, gradient: Tensor) -> None:
    """`loss.backward(gradient)`: runs the graph of `loss` and frees it on the way."""
    assert loss.node is not None
    device = loss.storage.device
    scope = device.scope
    with device.no_grad():
        _run_graph(device, loss.node, loss.slot, gradient)
    device.scope = scope


def _run_graph(device: Device, root: Node, slot: int, gradient: Tensor) -> None:
    waiting = _count_dependencies(root)
    buffers: dict[Node, list[Tensor | None]] = {root: [None] * len(root.metadata)}
    buffers[root][slot] = gradient
    ready = [(-root.sequence, 0, root)]
    ticket = 1
    while ready:
        node = heapq.heappop(ready)[2]
        device.scope = node.scope
        if device.offloads:
            bring_back(node)
        outputs = _call(node, buffers.pop(node))
        node.release()
        for index, edge in enumerate(node.edges):
            if edge is None:
                continue
            target, position = edge
            buffer = buffers.get(target)
            if buffer is None:
                buffer = buffers[target] = [None] * len(target.metadata)
            _add_to_buffer(device, buffer, position, outputs, index)
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, (-target.sequence, ticket, target))
                ticket += 1
            del buffer
        del outputs, node


def _call(node: Node, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Runs a node; its incoming gradients die as this returns (`call_function`)."""
    outputs = list(node.run(node, gradients))
    for index, edge in enumerate(node.edges):
        gradient = outputs[index]
        if edge is None or gradient is None:
            continue
        shape, dtype = edge[0].metadata[edge[1]]
        if gradient.shape != shape or gradient.dtype != dtype:
            gradient = None
            _conform(outputs, index, shape, dtype)
        del gradient
    return outputs


def _conform(outputs: list[Tensor | None], index: int, shape: Shape, dtype: str) -> None:
    """`validate_outputs`: sums a broadcast gradient down and casts it to the input's dtype."""
    gradient = outputs[index]
    assert gradient is not None
    outputs[index] = None
    if gradient.shape != shape:
        gradient = sum_to(gradient, shape)
    if gradient.dtype != dtype:
        gradient = to_dtype(gradient, dtype)
    outputs[index] = gradient


def _add_to_buffer(
    device: Device,
    buffer: list[Tensor | None],
    position: int,
    outputs: list[Tensor | None],
    index: int,
) -> None:
    """`InputBuffer::add`: moves a gradient in, or adds it, in place where nobody else sees it."""
    gradient = outputs[index]
    if gradient is None:
        return
    outputs[index] = None
    old = buffer[position]
    if old is None:
        buffer[position] = gradient
        return
    if device.in_place_sums and _is_uniquely_owned(buffer, position):
        pointwise_cost(device, "aten.add_", old, 2)
        return
    buffer[position] = add(old, gradient)


def _is_uniquely_owned(buffer: list[Tensor | None], position: int) -> bool:
    """`can_accumulate_inplace`: dense, one reference to the tensor and one to its storage.

    getrefcount counts its own argument; the buffer's entry and the caller's name `old` are the two
    references that are allowed.
    """
    old = buffer[position]
    assert old is not None
    return (
        getrefcount(old) <= 4 and getrefcount(old.storage) <= 2 and is_dense(old.shape, old.strides)
    )


def _count_dependencies(root: Node) -> dict[Node, int]:
    waiting: dict[Node, int] = {root: 0}
    stack = [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is None:
                continue
            target = edge[0]
            if target in waiting:
                waiting[target] += 1
            else:
                waiting[target] = 1
                stack.append(target)
    return waiting


# Autocast as CUDA has it (aten/src/ATen/autocast_mode.h): what is cast, and the cache of casts.

_ELIGIBLE = frozenset({"float32", "bfloat16", "float16"})


class Autocast:
    """The low-precision dtype, and the casts of fp32 leaves made so far inside the context."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.casts: dict[int, tuple[Parameter, Tensor]] = {}


class AutocastScope:
    """`torch.autocast("cuda", dtype)`, or nothing for None. The casts are dropped at its end.

    An inner scope shares the outer's cache: PyTorch clears it only when the outermost one ends.
    """

    def __init__(self, device: Device, dtype: str | None) -> None:
        self.device = device
        self.dtype = dtype
        self.outermost = dtype is not None and device.autocast is None

    def __enter__(self) -> None:
        if self.outermost and self.dtype is not None:
            self.device.autocast = Autocast(self.dtype)

    def __exit__(self, *_: object) -> None:
        if self.outermost:
            self.device.autocast = None


def cast_down(x: Tensor) -> Tensor:
    """x in the autocast dtype; from the cache where it is an fp32 leaf; itself without autocast."""
    context = x.storage.device.autocast
    if context is None or x.dtype == context.dtype or x.dtype not in _ELIGIBLE:
        return x
    if not (isinstance(x, Parameter) and x.requires_grad and x.dtype == "float32"):
        return to_dtype(x, context.dtype)
    known = context.casts.get(id(x))
    if known is None:
        known = context.casts[id(x)] = (x, to_dtype(x, context.dtype))
    return known[1]


# Activations in the host's memory: the mirror of `offloading` in `planner/training/levers.py`.
# Change both.

_STAY = frozenset(("parameters", "buffers"))


class _Moved:
    """A storage on the host, and from its first use in backward on the device again."""

    __slots__ = ("__weakref__", "device", "dtype", "num_bytes", "storage")

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.storage.device
        self.dtype = tensor.dtype
        self.num_bytes = tensor.storage.num_bytes
        self.storage: Storage | None = None
        self._transfer(TO_HOST)

    def back(self) -> Storage:
        if self.storage is None:
            self.storage = Storage(self.device, self.num_bytes, "aten._to_copy")
            self.storage.hold()
            self._transfer(TO_DEVICE)
        return self.storage

    def _transfer(self, name: str) -> None:
        self.device.compute(name, "transfer", self.dtype, 0, self.num_bytes)


class _Packed:
    """A saved tensor: a view of what moved."""

    __slots__ = ("moved", "shape", "strides")

    def __init__(self, moved: _Moved, shape: Shape, strides: Shape) -> None:
        self.moved, self.shape, self.strides = moved, shape, strides

    def unpack(self) -> Tensor:
        return Tensor(self.moved.back(), self.shape, self.strides, self.moved.dtype)


class _Stayed:
    """A saved tensor that is on the device until it is released."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        tensor.storage.hold()

    def __del__(self) -> None:
        self.tensor.storage.let_go()

    def unpack(self) -> Tensor:
        return self.tensor.detach()


@contextmanager
def offload_activations(device: Device, kept: Iterable[Tensor]) -> Iterator[None]:
    """A context for the forward and the loss: storages of `kept`, parameters, buffers and scalars
    stay."""
    stay = {tensor.storage.ident for tensor in kept}
    moved: dict[tuple[int, str], weakref.ref[_Moved]] = {}

    def pack(tensor: Tensor) -> _Packed | _Stayed:
        storage = tensor.storage
        if not tensor.shape or storage.ident in stay or storage.category in _STAY:
            return _Stayed(tensor)
        key = storage.ident, tensor.dtype
        known = moved.get(key)
        found = known() if known is not None else None
        if found is None:
            found = _Moved(tensor)
            moved[key] = weakref.ref(found)
        return _Packed(found, tensor.shape, tensor.strides)

    device.offloads = True
    device.saved_tensor_hooks.append((pack, _unpack))
    try:
        yield
    finally:
        device.saved_tensor_hooks.pop()


def bring_back(node: Node) -> None:
    """A node unpacks all that it saved before it runs (torch's generated `apply`)."""
    for saved in node.saved:
        if isinstance(saved.packed, _Packed):
            saved.packed.moved.back()


def _unpack(packed: _Packed | _Stayed) -> Tensor:
    return packed.unpack()


# Activation checkpointing without re-entrance (torch/utils/checkpoint.py, use_reentrant=False).
#
# Forward packs each saved tensor into a holder that keeps nothing; the first unpack in backward
# runs the function again, up to the last tensor that was saved, and each recomputed tensor lives
# until its own unpack.

# Results that selective checkpointing keeps, so that its recomputation need not compute them.
#
# torch/utils/checkpoint.py, `_CachingTorchDispatchMode` and `_CachedTorchDispatchMode`: forward
# stores the results of chosen operations, whether backward needs them or not; the recomputation
# takes each one out again, and what it does not reach stays until the checkpointed call's frame
# dies.

Results = tuple[Tensor, ...]


class KeptResults:
    """What one checkpointed call keeps, in the order in which it was computed."""

    __slots__ = ("_kept", "is_recomputing")

    def __init__(self) -> None:
        self._kept: deque[Results] = deque()
        self.is_recomputing = False

    def __del__(self) -> None:
        while self._kept:
            for tensor in self._kept.popleft():
                tensor.storage.let_go()

    def result_of(self, compute: Callable[[], Results]) -> Results:
        """What `compute` gives: computed and kept, or taken out of what was kept."""
        if not self.is_recomputing:
            results = compute()
            self._kept.append(tuple(result.detach() for result in results))
            for result in results:
                result.storage.hold()
            return results
        results = self._kept.popleft()
        for result in results:
            result.storage.let_go()
        return results


def kept(device: Device, compute: Callable[[], Results]) -> Results:
    """The results of an operation that selective checkpointing keeps, wherever it is run."""
    if device.kept_results is None:
        return compute()
    return device.kept_results.result_of(compute)


Function = Callable[..., Any]


class _Handle:
    """Stands for one recomputed tensor; the tensor dies with it."""

    __slots__ = ("__weakref__",)


class _Holder:
    """What a saved tensor is packed into."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self) -> None:
        self.handle: _Handle | None = None


class _Stop(Exception):  # noqa: N818 (a signal, not an error)
    """The last tensor that backward needs has been recomputed."""


class _SavedArgument:
    """An argument kept for the recomputation, which sees it with its history."""

    __slots__ = ("node", "requires_grad", "saved", "slot")

    def __init__(self, tensor: Tensor) -> None:
        self.saved = Saved(tensor)
        self.requires_grad, self.node, self.slot = tensor.requires_grad, tensor.node, tensor.slot

    def unpack(self) -> Tensor:
        tensor = self.saved.unpack().detach()
        tensor.requires_grad, tensor.node, tensor.slot = self.requires_grad, self.node, self.slot
        return tensor


class _Frame:
    """One checkpointed call: its function, its inputs, and what has been recomputed of it."""

    def __init__(
        self, device: Device, function: Function, args: tuple[Any, ...], kept: KeptResults | None
    ) -> None:
        self.device = device
        self.function = function
        self.saved_args: list[Any] = []
        for arg in args:
            # A recomputation around this one may stop right here.
            self.saved_args.append(_SavedArgument(arg) if isinstance(arg, Tensor) else arg)
        self.autocast_dtype = device.autocast.dtype if device.autocast else None
        self.scope = device.scope
        self.kept = kept
        self.holders: list[weakref.ref[_Holder]] = []
        self.recomputed: weakref.WeakKeyDictionary[_Handle, Tensor] = weakref.WeakKeyDictionary()
        self.num_recomputed = 0
        self.is_recomputed = False

    def __del__(self) -> None:
        for arg in self.saved_args:
            if isinstance(arg, _SavedArgument):
                arg.saved.release()

    def pack(self, tensor: Tensor) -> _Holder:
        holder = _Holder()
        self.holders.append(weakref.ref(holder))
        return holder

    def unpack(self, holder: _Holder) -> Tensor:
        if not self.is_recomputed:
            args = [a.unpack() if isinstance(a, _SavedArgument) else a for a in self.saved_args]
            self._recompute(args)
            self.is_recomputed = True
        assert holder.handle is not None, "unpacked twice"
        tensor = self.recomputed[holder.handle]
        holder.handle = None
        return tensor

    def _recompute(self, args: list[Any]) -> None:
        """Runs the function again with gradients on, under the autocast of the first time."""
        device = self.device
        grad_enabled, device.grad_enabled = device.grad_enabled, True
        scope, device.scope = device.scope, self.scope
        outer, device.kept_results = device.kept_results, self.kept
        if self.kept is not None:
            self.kept.is_recomputing = True
        hooks = len(device.saved_tensor_hooks)
        device.saved_tensor_hooks.append((_Recomputation(self).pack, _unchanged))
        try:
            with AutocastScope(device, self.autocast_dtype):
                _run(self.function, *args)
        except _Stop:
            pass
        del device.saved_tensor_hooks[hooks:]
        device.grad_enabled, device.scope = grad_enabled, scope
        device.kept_results = outer


class _Recomputation:
    """The pack hook of a recomputation: gives each tensor to the holder of its first time."""

    __slots__ = ("frame",)

    def __init__(self, frame: _Frame) -> None:
        self.frame = weakref.ref(frame)

    def pack(self, tensor: Tensor) -> Tensor:
        frame = self.frame()
        assert frame is not None
        index = frame.num_recomputed
        frame.num_recomputed += 1
        holder = frame.holders[index]()
        if holder is not None:
            holder.handle = _Handle()
            frame.recomputed[holder.handle] = tensor
        if frame.num_recomputed == len(frame.holders):
            raise _Stop
        return tensor


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _run(function: Function, *args: Any) -> None:
    function(*args)


def checkpoint(function: Function, *args: Any, selective: bool = False) -> Any:
    """`torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)`; `selective` with
    the contexts of `planner.training.levers.keep_contexts`."""
    device: Device = next(a for a in args if isinstance(a, Tensor)).device
    if device.checkpoint_region is not None:
        return device.checkpoint_region(function, args)
    if not device.grad_enabled:
        return function(*args)
    kept = KeptResults() if selective else None
    frame = _Frame(device, function, args, kept)
    device.saved_tensor_hooks.append((frame.pack, frame.unpack))
    outer, device.kept_results = device.kept_results, kept
    del frame, kept
    result = function(*args)
    device.kept_results = outer
    device.saved_tensor_hooks.pop()
    return result


# Activation checkpointing with re-entrance (torch/utils/checkpoint.py, CheckpointFunction).
#
# What `torch.utils.checkpoint.checkpoint(function, x)` does when not told otherwise: forward
# records nothing but x; backward runs the whole function again from a detached x, then a backward
# of its own through what that recorded.


class _Leaf(Parameter):
    """The detached x: the same storage, and a gradient that goes no further."""

    __slots__ = ()

    def __init__(self, x: Tensor) -> None:
        Tensor.__init__(self, x.storage, x.shape, x.strides, x.dtype)
        self.requires_grad = True
        self.cell = GradientCell()


def checkpoint_reentrantly(function: Callable[..., Any], x: Tensor) -> Tensor:
    """`torch.utils.checkpoint.checkpoint(function, x, use_reentrant=True)`: saves x."""
    device = x.storage.device
    if device.checkpoint_region is not None:
        region: Tensor = device.checkpoint_region(function, (x,))
        return region
    dtype = device.autocast.dtype if device.autocast else None
    node = begin("CheckpointFunctionBackward", (x,), _checkpoint_backward, (x,), (function, dtype))
    with device.no_grad():
        outputs: Tensor = function(x)
    return finish(outputs, node)


def _checkpoint_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """The casts of weights made in the recomputation live until its autocast ends."""
    function, dtype = node.data
    tensor = node.unpack(0)
    device = tensor.storage.device
    detached = _Leaf(tensor)
    grad_enabled, device.grad_enabled = device.grad_enabled, True
    with AutocastScope(device, dtype):
        outputs = function(detached)
    device.grad_enabled = grad_enabled
    gradient = grads[0]
    assert gradient is not None
    backward(outputs, gradient)
    return (detached.cell.grad,)
