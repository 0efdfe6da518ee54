"""Gradient sums as eager makes them, while a dispatch mode watches.

Under a dispatch mode PyTorch takes every tensor for one whose operations must not be done in place
(`isTensorSubclassLike`), so the sums of gradients, and the scatters of a few backward formulas, get
a new storage. Without a mode they are in place: a formula's own zeros always, a gradient waiting in
the engine's input buffer if the buffer alone owns it and its storage
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Literal

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from planner.trace.kernels import is_in_place
from planner.trace.scratch import is_dense

GradientSums = Literal["out_of_place", "in_place"]

aten = torch.ops.aten
_autograd: Any = torch.autograd  # torch's stubs do not know of all that it has
# Node: what it does out of place only where it sees a subclass, and what it does elsewhere
# (torch/csrc/autograd/FunctionsManual.cpp and the formulas in derivatives.yaml).
_IN_PLACE_FORMULAS: dict[tuple[str, Any], Any] = {
    ("IndexBackward0", aten.index_put.default): aten.index_put_.default,
    ("GatherBackward0", aten.scatter_add.default): aten.scatter_add_.default,
    ("BinaryCrossEntropyWithLogitsBackward0", aten.sub.Tensor): aten.sub_.Tensor,
    ("BinaryCrossEntropyWithLogitsBackward0", aten.mul.Tensor): aten.mul_.Tensor,
}

_COPY_SLICES = "torch::autograd::CopySlices"
# Nodes of views, and those formulas of theirs that make a gradient instead of viewing it.
_VIEWS = (
    "Alias", "AsStrided", "Diagonal", "Expand", "Permute", "ReshapeAlias", "Select", "Slice",
    "Squeeze", "T", "Transpose", "Unsqueeze", "View",
)  # fmt: skip
_WIDENED = ("Diagonal", "Select", "Slice")
_WIDENING = {getattr(aten, f"{name.lower()}_backward").default for name in _WIDENED}


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
        # Shapes of views that an operation rewrote, by the number of the node that says so.
        self._rewritten: dict[int, list[int]] = {}
        self._replayed: set[int] = set()  # numbers of nodes that are there in no eager step
        self._whole: weakref.ref[Any] | None = None  # the storage of the last whole gradient

    def hear_device_asked(self, tensor: Tensor) -> None:
        self._asked_device_of = id(tensor)

    def choose(self, func: Any, args: tuple[Any, ...]) -> Any:
        """`func`, or its in-place form where eager would run that."""
        asked, self._asked_device_of = self._asked_device_of, None
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            if is_in_place(func) and isinstance(args[0], Tensor) and args[0]._is_view():
                self._rewritten[_autograd._get_sequence_nr()] = list(args[0].shape)
            return func
        if func is aten.add.Tensor and id(args[1]) == asked:
            return aten.add_.Tensor if self._only_buffered(args[0]) else func
        node = torch._C._current_autograd_node()
        return _IN_PLACE_FORMULAS.get((node.name(), func), func) if node is not None else func

    def whole_gradient(self, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """What eager makes in the backward of a view whose history an in-place operation rewrote.

        Eager knows that view by its strides alone: its gradient is copied into new zeros of the
        whole (`AsStridedBackward`). A dispatch mode has the views of it replayed one by one. Where
        one of them widens the gradient, what the first such gives is the whole, and the others give
        views of it. Where none does, the gradient dies in eager as its copy is made; here it lives
        on, and the copy goes instead.
        """
        node: Any = torch._C._current_autograd_node()
        if node is None or not (func.is_view or func in _WIDENING):
            return None
        *views, last = _behind(node)
        is_first = self._is_first_replayed(node, views, last)
        self._replayed |= {view._sequence_nr() for view in views if is_first}
        if node._sequence_nr() not in self._replayed:
            return None
        given: Tensor = args[0]
        if func.is_view:
            if not is_first or any(_kind(view) in _WIDENED for view in views):
                return None
            return torch.empty_like(given, memory_format=torch.contiguous_format)
        following, place = node.next_functions[0]
        shape: list[int] = following._input_metadata[place].shape
        if self._whole is None or self._whole() is not given.untyped_storage():
            given = torch.empty(last._input_metadata[0].shape, dtype=given.dtype)
            self._whole = weakref.ref(given.untyped_storage())
        return given.as_strided(shape, make_contiguous_strides_for(shape), 0)

    def _is_first_replayed(self, node: Any, views: list[Any], last: Any) -> bool:
        if not views or last.name() != _COPY_SLICES or node._sequence_nr() in self._replayed:
            return False
        shape: list[int] = node._input_metadata[0].shape
        return self._rewritten.get(last._sequence_nr()) == shape

    def _only_buffered(self, tensor: Tensor) -> bool:
        return is_dense(tensor) and _owners(tensor) == self._owners_when_alone


def _behind(node: Any) -> list[Any]:
    """`node` and the nodes of the views that it is of, up to that of no view."""
    nodes = [node]
    while _kind(nodes[-1]) in _VIEWS and len(nodes[-1].next_functions) == 1:
        nodes.append(nodes[-1].next_functions[0][0])
    return nodes


def _kind(node: Any) -> str:
    """`Slice` of `SliceBackward0`."""
    name: str = node.name()
    return name.split("Backward")[0]


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
