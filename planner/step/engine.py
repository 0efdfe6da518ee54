"""Backward on shapes: it runs the graph that autograd recorded, and frees it on the way. Then what
changes the tensors that are saved for it: autocast, offloading, checkpointing.

The order and the lifetimes are those of PyTorch's engine (torch/csrc/autograd/engine.cpp,
input_buffer.cpp): nodes run by descending sequence number, gradients of leaves first; a node's
incoming gradients die when it returns, its saved tensors right after.
"""

import heapq
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from sys import getrefcount
from typing import Any

from planner.ledger.ledger import TO_DEVICE, TO_HOST
from planner.step.autograd import make_node, set_history
from planner.step.layout import Shape, is_dense
from planner.step.pointwise import add, sum_to, to_dtype
from planner.step.tensor import (
    Autocast,
    Device,
    GradientCell,
    Gradients,
    KeptResults,
    Node,
    Parameter,
    Saved,
    Storage,
    Tensor,
)


def backward(loss: Tensor, gradient: Tensor) -> None:
    """`loss.backward(gradient)`: runs the graph of `loss` and frees it on the way."""
    assert loss.node is not None
    device = loss.storage.device
    scope = device.scope
    with device.no_grad():
        _run_graph(device, loss.node, loss.slot, gradient)
    device.scope = scope


def _run_graph(device: Device, root: Node, slot: int, gradient: Tensor) -> None:
    dependencies = _count_dependencies(root)
    buffers: dict[Node, list[Tensor | None]] = {root: [None] * len(root.metadata)}
    buffers[root][slot] = gradient
    ready = [(-root.sequence, 0, root)]
    ticket = 1
    while ready:
        node = heapq.heappop(ready)[2]
        device.scope = node.scope
        if device.offloads:
            fetch_saved(node)
        outputs = _call_function(node, buffers.pop(node))
        node.release()
        for index, edge in enumerate(node.edges):
            if edge is None:
                continue
            target, position = edge
            buffer = buffers.get(target)
            if buffer is None:
                buffer = buffers[target] = [None] * len(target.metadata)
            _add_to_buffer(device, buffer, position, outputs, index)
            dependencies[target] -= 1
            if dependencies[target] == 0:
                heapq.heappush(ready, (-target.sequence, ticket, target))
                ticket += 1
            del buffer
        del outputs, node


def _call_function(node: Node, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Runs a node; its incoming gradients die as this returns (`call_function`)."""
    outputs = list(node.run(node, gradients))
    for index, edge in enumerate(node.edges):
        gradient = outputs[index]
        if edge is None or gradient is None:
            continue
        shape, dtype = edge[0].metadata[edge[1]]
        if gradient.shape != shape or gradient.dtype != dtype:
            gradient = None
            _validate_output(outputs, index, shape, dtype)
        del gradient
    return outputs


def _validate_output(outputs: list[Tensor | None], index: int, shape: Shape, dtype: str) -> None:
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
    """`InputBuffer::add`: moves a gradient in, or adds it, in place where it has no other owner."""
    gradient = outputs[index]
    if gradient is None:
        return
    outputs[index] = None
    old = buffer[position]
    if old is None:
        buffer[position] = gradient
        return
    if device.in_place_sums and _is_uniquely_owned(buffer, position):
        device.compute_pointwise("aten.add_", old, 2)
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
    dependencies: dict[Node, int] = {root: 0}
    stack = [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is None:
                continue
            target = edge[0]
            if target in dependencies:
                dependencies[target] += 1
            else:
                dependencies[target] = 1
                stack.append(target)
    return dependencies


# Autocast on CUDA (aten/src/ATen/autocast_mode.h): which tensors it casts, and its cache.

_ELIGIBLE = frozenset({"float32", "bfloat16", "float16"})


class AutocastScope:
    """`torch.autocast("cuda", dtype)`; None: no autocast. Its end drops the cached casts.

    An inner scope shares the outer one's cache: PyTorch clears it only as the outermost one ends.
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
    """x in the autocast dtype, from the cache if x is an fp32 leaf; x itself without autocast."""
    context = x.storage.device.autocast
    if context is None or x.dtype == context.dtype or x.dtype not in _ELIGIBLE:
        return x
    if not (isinstance(x, Parameter) and x.requires_grad and x.dtype == "float32"):
        return to_dtype(x, context.dtype)
    cached = context.casts.get(id(x))
    if cached is None:
        cached = context.casts[id(x)] = (x, to_dtype(x, context.dtype))
    return cached[1]


# Activations in the host's memory: the mirror of `offload_activations` in
# `planner/training/levers.py`. Change both.

_STAY = frozenset(("parameters", "buffers"))


class _HostStorage:
    """A storage on the host; from its first use in backward on it is on the device again."""

    __slots__ = ("__weakref__", "device", "dtype", "num_bytes", "storage")

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.storage.device
        self.dtype = tensor.dtype
        self.num_bytes = tensor.storage.num_bytes
        self.storage: Storage | None = None
        self._transfer(TO_HOST)

    def fetch(self) -> Storage:
        if self.storage is None:
            self.storage = Storage(self.device, self.num_bytes, "aten._to_copy")
            self.storage.hold()
            self._transfer(TO_DEVICE)
        return self.storage

    def _transfer(self, name: str) -> None:
        self.device.compute(name, "transfer", self.dtype, 0, self.num_bytes)


class _HostTensor:
    """A saved tensor: a view of a storage on the host."""

    __slots__ = ("shape", "storage", "strides")

    def __init__(self, storage: _HostStorage, shape: Shape, strides: Shape) -> None:
        self.storage, self.shape, self.strides = storage, shape, strides

    def unpack(self) -> Tensor:
        return Tensor(self.storage.fetch(), self.shape, self.strides, self.storage.dtype)


class _DeviceTensor:
    """A saved tensor that stays on the device until it is released."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        tensor.storage.hold()

    def __del__(self) -> None:
        self.tensor.storage.let_go()

    def unpack(self) -> Tensor:
        return self.tensor.detach()


@contextmanager
def offload_activations(device: Device, resident: Iterable[Tensor]) -> Iterator[None]:
    """A context for the forward and the loss, which offloads saved tensors. Parameters, buffers,
    scalars and views of the `resident` tensors stay on the device."""
    resident_storages = {tensor.storage.ident for tensor in resident}
    on_host: dict[tuple[int, str], weakref.ref[_HostStorage]] = {}

    def pack(tensor: Tensor) -> _HostTensor | _DeviceTensor:
        storage = tensor.storage
        is_resident = storage.ident in resident_storages or storage.category in _STAY
        if is_resident or not tensor.shape:
            return _DeviceTensor(tensor)
        key = storage.ident, tensor.dtype
        reference = on_host.get(key)
        host_storage = reference() if reference is not None else None
        if host_storage is None:
            host_storage = _HostStorage(tensor)
            on_host[key] = weakref.ref(host_storage)
        return _HostTensor(host_storage, tensor.shape, tensor.strides)

    device.offloads = True
    device.saved_tensor_hooks.append((pack, _unpack))
    try:
        yield
    finally:
        device.saved_tensor_hooks.pop()


def fetch_saved(node: Node) -> None:
    """A node unpacks all its saved tensors before it runs (torch's generated `apply`)."""
    for saved in node.saved:
        if isinstance(saved.packed, _HostTensor):
            saved.packed.storage.fetch()


def _unpack(packed: _HostTensor | _DeviceTensor) -> Tensor:
    return packed.unpack()


# Activation checkpointing without re-entrance (torch/utils/checkpoint.py, use_reentrant=False).
#
# Forward packs each saved tensor into an empty holder. The first unpack in backward runs the
# function again, up to the last saved tensor; each recomputed tensor lives until it is unpacked.

Function = Callable[..., Any]


class _Handle:
    """The handle of one recomputed tensor, which dies with it."""

    __slots__ = ("__weakref__",)


class _Holder:
    """The empty holder that a saved tensor is packed into."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self) -> None:
        self.handle: _Handle | None = None


class _Stop(Exception):  # noqa: N818 (a signal, not an error)
    """The last tensor that backward needs has been recomputed."""


class _SavedArgument:
    """An argument that is saved, with its history, for the recomputation."""

    __slots__ = ("node", "requires_grad", "saved", "slot")

    def __init__(self, tensor: Tensor) -> None:
        self.saved = Saved(tensor)
        self.requires_grad, self.node, self.slot = tensor.requires_grad, tensor.node, tensor.slot

    def unpack(self) -> Tensor:
        tensor = self.saved.unpack().detach()
        tensor.requires_grad, tensor.node, tensor.slot = self.requires_grad, self.node, self.slot
        return tensor


class _Frame:
    """One checkpointed call: its function, its arguments, and its recomputed tensors."""

    def __init__(
        self, device: Device, function: Function, args: tuple[Any, ...], results: KeptResults | None
    ) -> None:
        self.device = device
        self.function = function
        self.saved_args: list[Any] = []
        for arg in args:
            # A recomputation around this one may stop right here.
            self.saved_args.append(_SavedArgument(arg) if isinstance(arg, Tensor) else arg)
        self.autocast_dtype = device.autocast.dtype if device.autocast else None
        self.scope = device.scope
        self.kept_results = results
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
        outer, device.kept_results = device.kept_results, self.kept_results
        if self.kept_results is not None:
            self.kept_results.is_recomputing = True
        hooks = len(device.saved_tensor_hooks)
        device.saved_tensor_hooks.append((_Recomputation(self).pack, _identity))
        try:
            with AutocastScope(device, self.autocast_dtype):
                self.function(*args)
        except _Stop:
            pass
        del device.saved_tensor_hooks[hooks:]
        device.grad_enabled, device.scope = grad_enabled, scope
        device.kept_results = outer


class _Recomputation:
    """The pack hook of a recomputation: it gives each tensor to its holder of the forward."""

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


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def checkpoint(function: Function, *args: Any, selective: bool = False) -> Any:
    """`torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)`; `selective` with
    the contexts of `planner.training.levers.keep_contexts`."""
    device: Device = next(a for a in args if isinstance(a, Tensor)).device
    if device.checkpoint_region is not None:
        return device.checkpoint_region(function, args)
    if not device.grad_enabled:
        return function(*args)
    results = KeptResults() if selective else None
    frame = _Frame(device, function, args, results)
    device.saved_tensor_hooks.append((frame.pack, frame.unpack))
    outer, device.kept_results = device.kept_results, results
    del frame, results
    result = function(*args)
    device.kept_results = outer
    device.saved_tensor_hooks.pop()
    return result


# Activation checkpointing with re-entrance (torch/utils/checkpoint.py, CheckpointFunction).
#
# The default of `torch.utils.checkpoint.checkpoint(function, x)`: forward saves only x; backward
# runs the whole function again from a detached x, and then a backward through the graph which that
# recorded.


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
    node = make_node(
        "CheckpointFunctionBackward", (x,), _checkpoint_backward, (x,), (function, dtype)
    )
    with device.no_grad():
        outputs: Tensor = function(x)
    return set_history(outputs, node)


def _checkpoint_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """The recomputation and its backward. Casts of weights live until its autocast ends."""
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
