"""Every storage that operations on fake tensors allocate and release, in order."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.step.ledger import Allocated, Event, Freed, Marked
from planner.trace.kernels import host_results, run_as_on_cuda
from planner.trace.sums import GradientSums, InPlaceSums


class Recorder(TorchDispatchMode):
    """Runs operations as they are and writes down what becomes of their storages.

    A storage is known by the address of its C++ object while it lives; `events` calls it by a
    number of its own. Storages that no operation returned are met when one uses them.
    """

    def __init__(self, sums: GradientSums = "out_of_place") -> None:
        super().__init__()
        self._sums = InPlaceSums() if sums == "in_place" else None
        self.events: list[Event] = []
        self.host_storages = False  # set while scalars are made that a GPU run keeps on the host
        self._alive: dict[int, tuple[int, Any]] = {}
        self._host: dict[int, Any] = {}
        self._next = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.note((args, kwargs), "unseen")
        if self._sums is not None:
            func = self._sums.choose(func, args)
        result = run_as_on_cuda(func, args, kwargs or {})
        self.note_host(host_results(func, result))
        self.note(result, str(func))
        return result

    def note(self, tree: Any, label: str) -> None:
        """Counts the storages of all tensors in `tree` that are not yet known."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self.add(leaf, label)

    def add(self, tensor: Tensor, label: str) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive or address in self._host or storage.nbytes() == 0:
            return
        if self.host_storages and tensor.dim() == 0:
            self.note_host([tensor])
            return
        number, self._next = self._next, self._next + 1
        self._alive[address] = (number, weakref.ref(storage, partial(self._free, address)))
        self.events.append(Allocated(number, storage.nbytes(), label))

    def note_host(self, tensors: Iterable[Tensor]) -> None:
        """These live on the host in a GPU run: they are never counted."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage._cdata
            self._host[address] = weakref.ref(storage, partial(self._forget, address))

    def number_of(self, tensor: Tensor) -> int | None:
        known = self._alive.get(tensor.untyped_storage()._cdata)
        return known[0] if known else None

    def mark(self, phase: str, step: int) -> None:
        self.events.append(Marked(phase, step))

    def alive(self) -> Iterable[int]:
        return [number for number, _ in self._alive.values()]

    def _forget(self, address: int, _: Any) -> None:
        del self._host[address]

    def _free(self, address: int, _: Any) -> None:
        number, _ = self._alive.pop(address)
        self.events.append(Freed(number))
