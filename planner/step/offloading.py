"""Activations in the host's memory, on shapes: the mirror of `planner/training/offloading.py`;
change both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from planner.ledger.ledger import TO_DEVICE, TO_HOST
from planner.step.strides import Shape
from planner.step.tensor import Device, Storage, Tensor

if TYPE_CHECKING:
    from planner.step.autograd import Node

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
