"""Activations in the host's memory: what backward needs leaves the device, and comes back for it.

`torch.autograd.graph.save_on_cpu` moves every tensor that autograd saves: weights too, which stay
on the device whatever happens; a tensor twice where two operations save it; and a view as a copy,
laid out anew. Here each storage moves once each way, as it is; weights, buffers and the batch stay.

Copies go through pinned memory on the stream that computes, as `save_on_cpu(pin_memory=True)` makes
them: the host goes on at once, the device waits for each. Imports only torch, so that a script
which `planner emit` writes can hold a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Moved:
    """A storage's elements, flat: on the host, and from their first use in backward on the device
    again, until the last tensor that was saved of them is released."""

    def __init__(self, flat: Tensor) -> None:
        self.device = flat.device
        self.flat = copy_to_host(flat)

    def back(self) -> Tensor:
        if not is_on_device(self.flat):
            self.flat = copy_back(self.flat, self.device)
        return self.flat


def offload_activations(kept: Iterable[Tensor]) -> saved_tensors_hooks:
    """A context for the forward (and the loss). What shares a storage with `kept` stays, and so do
    scalars, tensors of the host (all of them, on a CPU) and those without a storage of their own.
    """
    stay = {tensor.untyped_storage()._cdata for tensor in kept}
    moved: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[Any, weakref.ref[Moved]]]
    moved = weakref.WeakKeyDictionary()

    def pack(tensor: Tensor) -> Any:
        if tensor.dim() == 0 or not is_on_device(tensor) or not _is_plain(tensor):
            return tensor.detach()
        storage = tensor.untyped_storage()
        if storage._cdata in stay:
            return tensor.detach()
        content = tensor._version, tensor.dtype
        before, known = moved.get(storage, (None, None))
        found = known() if known is not None and before == content else None
        if found is None:
            num_elements = storage.nbytes() // tensor.element_size()
            found = Moved(tensor.detach().as_strided((num_elements,), (1,), 0))
            moved[storage] = content, weakref.ref(found)
        return found, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        found, size, stride, offset = packed
        view: Tensor = found.back().as_strided(size, stride, offset)
        return view

    return saved_tensors_hooks(pack, unpack)


def is_on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def copy_to_host(flat: Tensor) -> Tensor:
    host = torch.empty_like(flat, device="cpu", pin_memory=True)
    return host.copy_(flat, non_blocking=True)


def copy_back(flat: Tensor, device: torch.device) -> Tensor:
    return flat.to(device, non_blocking=True)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
