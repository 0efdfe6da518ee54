"""Activation checkpointing without re-entrance (torch/utils/checkpoint.py, use_reentrant=False).

Forward packs each saved tensor into a holder that keeps nothing; the first unpack in backward runs
the function again, up to the last tensor that was saved, and each recomputed tensor lives until
its own unpack.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from planner.step.autocast import AutocastScope
from planner.step.autograd import Gradients, Node, Saved, begin, finish
from planner.step.engine import backward
from planner.step.tensor import Device, GradientCell, Parameter, Tensor

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
    the contexts of `planner.libraries.checkpointing.keep`."""
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
