"""Gradient sums as eager makes them, while a dispatch mode watches.

Under a dispatch mode PyTorch takes every tensor for one whose operations must not be done in place
(`isTensorSubclassLike`), so the sums of gradients, and the scatters of a few backward formulas, get
a new storage. Without a mode they are in place: a formula's own zeros always, a gradient waiting in
the engine's input buffer if the buffer alone owns it and its storage
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`).
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

GradientSums = Literal["out_of_place", "in_place"]

aten = torch.ops.aten
# Node: what it does out of place only where it sees a subclass, and what it does elsewhere
# (torch/csrc/autograd/FunctionsManual.cpp and the formulas in derivatives.yaml).
_IN_PLACE_FORMULAS: dict[tuple[str, Any], Any] = {
    ("IndexBackward0", aten.index_put.default): aten.index_put_.default,
    ("GatherBackward0", aten.scatter_add.default): aten.scatter_add_.default,
    ("BinaryCrossEntropyWithLogitsBackward0", aten.sub.Tensor): aten.sub_.Tensor,
    ("BinaryCrossEntropyWithLogitsBackward0", aten.mul.Tensor): aten.mul_.Tensor,
}

_COPY_SLICES = "torch::autograd::CopySlices"


class InPlaceSums:
    """Tells the engine's sums from others, and turns those that eager does in place.

    The engine asks the new gradient for its device directly before it adds it to the waiting one;
    no formula of a backward node does that before adding.
    """

    def __init__(self) -> None:
        self._owners_when_alone = _owners_when_alone()
        self._asked_device_of: int | None = (
            None  # an id, not a reference: lifetimes must not change
        )

    def hear_device_asked(self, tensor: Tensor) -> None:
        self._asked_device_of = id(tensor)

    def choose(self, func: Any, args: tuple[Any, ...]) -> Any:
        """`func`, or its in-place form where eager would run that."""
        asked, self._asked_device_of = self._asked_device_of, None
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return func
        if func is aten.add.Tensor and id(args[1]) == asked:
            return aten.add_.Tensor if self._only_buffered(args[0]) else func
        node = torch._C._current_autograd_node()
        return _IN_PLACE_FORMULAS.get((node.name(), func), func) if node is not None else func

    def scratch(self, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """What eager would allocate besides: the copy of a gradient whose view is replayed here.

        The gradient dies as its copy is made; here it lives on, and the copy goes instead.
        """
        node = torch._C._current_autograd_node()
        if node is None or not func.is_view or not _leads_to_copied_slices(node):
            return None
        return torch.empty_like(args[0], memory_format=torch.contiguous_format)

    def _only_buffered(self, tensor: Tensor) -> bool:
        return is_dense(tensor) and _owners(tensor) == self._owners_when_alone


def _leads_to_copied_slices(node: Any) -> bool:
    """Whether the node stands for a view of a tensor whose history an in-place operation rewrote.

    Eager knows that view by its strides alone: its gradient is new zeros of the whole, and a copy
    (`AsStridedBackward`). A dispatch mode has the view itself replayed, and its gradient is a view.
    """
    following = [function for function, _ in node.next_functions if function is not None]
    return [f.name() for f in following] == [_COPY_SLICES] and node.name() != _COPY_SLICES


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without overlap, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _owners(tensor: Tensor) -> tuple[int, int]:
    counted: Any = tensor  # torch's stubs know of these counts from 2.15 on
    core: Any = torch._C
    return counted._use_count(), core._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def _owners_when_alone() -> tuple[int, int]:
    """What `_owners` counts for a gradient that only the engine's buffer holds: the call itself
    holds some, so it is measured on a sum known to be of that kind (`x * x`)."""
    counted: list[tuple[int, int]] = []
    asked: list[int] = [0]

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor and id(args[1]) == asked[0]:
                counted.append(_owners(args[0]))
            asked[0] = id(args[0]) if func is torch.ops.prim.device.default else 0
            return func(*args, **kwargs or {})

    with FakeTensorMode(), Counter():  # type: ignore[no-untyped-call]
        product = torch.ones(2, requires_grad=True) * 1
        (product * product).sum().backward()
    assert len(counted) == 1, f"torch {torch.__version__} sums gradients in another way"
    (owners,) = counted
    return owners
