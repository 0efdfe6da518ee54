"""Every storage that operations on fake tensors allocate and release, in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)

from planner.core.collectives import Collective, Group
from planner.ledger.kinds import kind_of
from planner.ledger.ledger import (
    IN_BACKWARD,
    OPTIMIZER_CALL,
    TO_DEVICE,
    TO_HOST,
    Allocated,
    Awaited,
    Category,
    Computed,
    Emptied,
    Event,
    Freed,
    Marked,
    Scratch,
    Sent,
    Tagged,
)
from planner.trace.costs import copy_cost, cost_of, transfer_cost
from planner.trace.faults import data_read
from planner.trace.kernels import chunk_cat_table, host_results, run_as_on_cuda
from planner.trace.paths import ModulePaths
from planner.trace.scratch import FOLLOWED
from planner.trace.sums import GradientSums, InPlaceSums
from planner.trace.trees import tensors_in
from planner.trace.values import Values

aten = torch.ops.aten
_DEVICE, _META = torch.ops.prim.device.default, torch.device("meta")
_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
# Operations of several devices: collectives, and what FSDP2 does before and after them.
_OF_DEVICES = frozenset(("c10d", "_c10d_functional", "fsdp"))
# What lies on the streams of FSDP2's collectives: gathered weights, and sums of gradients.
_CATEGORY_OF_STREAM: dict[str, Category] = {
    "all_gather_copy_in": "parameters", "all_gather": "parameters",
    "reduce_scatter": "gradients", "all_reduce": "gradients",
}  # fmt: skip
# Operations that hand a collective over: what it is, which argument is the whole array, and whose
# shards it concerns where these are copied (hsdp).
SENDING: dict[str, tuple[Collective, int, Group]] = {
    "c10d::_allgather_base_": ("all_gather", 0, "shard"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, "shard"),
    "c10d::allreduce_": ("all_reduce", 0, "replicate"),
    "_c10d_functional::all_reduce": ("all_reduce", 0, "shard"),
}


class Recorder(TorchDispatchMode):
    """Runs operations as they are and writes down what becomes of their storages.

    A storage is known by the address of its C++ object while it lives; `events` calls it by a
    number of its own. Storages that no operation returned are met when one uses them.
    With `paths` it also writes down what is computed, where, and which storages are gradients.
    """

    def __init__(
        self, sums: GradientSums = "out_of_place", paths: ModulePaths | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.running = ""  # the operation under way; it stays when that raises
        self.optimizing = False  # the optimizer may read values, and 10 is as good as any
        self.scalars_on_host = False  # its `step` and the like, unless fused or capturable
        self.values = Values()
        # The convolutions that cuDNN has tried its algorithms for, where it does.
        self.tried_convolutions: set[object] | None = None
        self._path_of_result = ""
        self._label = ""  # what is made under `labelled` is called, and it counts as no operation
        self.num_collectives = 0
        self.is_paused = False  # what runs now is no part of the step
        self.is_interrupted = False  # it ends at the next operation
        self.stream = ""  # that storages are allocated on: "" is the one that computes
        # Told of an operation that hands a collective over, by its name and arguments, and of one
        # that waits for the last.
        self.on_collective: Callable[[str, tuple[Any, ...]], None] | None = None
        self.on_wait: Callable[[], None] | None = None
        self._transfer = ""  # TO_HOST or TO_DEVICE, while a copy between them is under way
        self._sums = InPlaceSums() if sums == "in_place" else None
        self._paths = paths
        self._alive: dict[int, tuple[int, Any]] = {}
        self._host: dict[int, Any] = {}
        self._next = 0
        self._tagged: set[int] = set()
        self._recomputed: list[weakref.ref[Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return self._device_of(args[0])
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # it runs operations on the tensors that it wraps: those count
        if self.is_interrupted:
            raise KeyboardInterrupt
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        self.running = str(func)
        if func is aten.lift_fresh.default and args[0].dim() == 0:
            # A Python number that became a tensor (`mask[a:b] = 1`, `torch.tensor(1.0)`): there is
            # no kernel that would take it to the device before one uses it.
            self.note_host(args)
        path = self._path()
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return self._wait(args[0])
        self.note((args, kwargs), "unseen", path)
        whole: Any = None
        if self._sums is not None and not self.optimizing:
            func = self._sums.choose(func, args)
            whole = self._sums.whole_gradient(func, args)
            if whole is not None and func.is_view:
                whole = self._copied(args[0].untyped_storage(), whole, path)
            self.note(whole, "aten.new_zeros.default", path)
        if func is aten._local_scalar_dense.default:
            return self._read(args[0])
        scratch = self._note_scratch(func, args, kwargs, path)
        result = self._run(func, args, kwargs) if whole is None or func.is_view else whole
        if whole is not None and func.is_view:
            result.whole = whole  # of which it is a view in eager
        del whole
        if func.namespace in _OF_DEVICES:
            self._follow_devices(func, args, kwargs, result, path)
            del scratch
            self.running = ""
            return result
        on_host = self._is_result_on_host((args, kwargs))
        self.note_host(tensors_in(result) if on_host else host_results(func, args, result))
        self._note_result(func, args, result, path, on_host)
        if not self.optimizing:
            self.values.follow(func, args, kwargs, result)
        if self._paths is not None and self._transfer:
            self.events.append(transfer_cost(self._transfer, result, path))
        elif self._paths is not None and not on_host and not self._label:
            self._note_work(func, args, kwargs, result, path)
        del scratch
        self.running = ""
        return result

    def _note_result(
        self, func: Any, args: tuple[Any, ...], result: Any, path: str, on_host: bool
    ) -> None:
        """Counts the result, and what CUDA's kernel asks for beside it."""
        follow = None if on_host or self._label or self._transfer else FOLLOWED.get(func)
        if follow is None:
            self.note(result, self._label or self.running, path)
            return
        self._path_of_result = path
        follow(self, args, result)
        self.note(result, self.running, path)

    def took(self, law: str, sizes: tuple[int, ...]) -> int:
        number, self._next = self._next, self._next + 1
        self.events.append(Scratch(number, law, sizes, self.running, self._path_of_result))
        return number

    def gave_back(self, number: int) -> None:
        self.events.append(Freed(number))

    def take(self, num_bytes: int) -> Tensor:
        taken = torch.empty(num_bytes, dtype=torch.uint8)
        self.add(taken, self.running, self._path_of_result)
        return taken

    def made(self, result: Tensor | None) -> None:
        if result is not None:
            self.add(result, self.running, self._path_of_result)

    def tried_convolution(self, *key: object) -> None:
        if self.tried_convolutions is not None and key not in self.tried_convolutions:
            self.tried_convolutions.add(key)
            self.events.append(Emptied(self._path_of_result))

    def _device_of(self, tensor: FakeTensor) -> torch.device:
        """FakeTensorMode's own answer, at once: it is asked more often than any operation runs."""
        if self._sums is not None and not self.optimizing and not self.is_paused:
            self._sums.hear_device_asked(tensor)
        return _META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device

    def _path(self) -> str:
        if self.optimizing and torch._C._current_graph_task_id() != -1:
            return IN_BACKWARD
        return self._paths.current() if self._paths is not None else ""

    def begin_optimizer(self) -> None:
        """A `step` of an optimizer: of all weights, or of one where it is called in backward."""
        self.optimizing = True
        if self._paths is not None and torch._C._current_graph_task_id() != -1:
            call = Computed(OPTIMIZER_CALL, "pointwise", "float32", 0, 0, 0, IN_BACKWARD)
            self.events.append(call)

    def end_optimizer(self) -> None:
        self.optimizing = False

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags:
            result = self.values.run_known(func, args, kwargs)
            if result is not None:
                return result
        return run_as_on_cuda(func, args, kwargs)

    def _note_scratch(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], path: str
    ) -> Tensor | None:
        """Counts what CUDA's kernel allocates first and a fake one does not; returns what is alive
        until the result is."""
        if func._schema.name not in ("fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype"):
            return None
        table = torch.empty(chunk_cat_table(args[0], args[2], kwargs["out"]), dtype=torch.uint8)
        self.note(table, self.running, path)
        return table

    def _follow_devices(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, path: str
    ) -> None:
        """Counts an operation of several devices: a collective, or FSDP2's copies before and after.
        What runs beside the stream that computes is no work of the step."""
        self.note(result, self.running, path)
        category = _CATEGORY_OF_STREAM.get(self.stream)
        if category is not None:
            self.tag(tensors_in((args, kwargs, result)), category)
        if self.on_collective is not None and func._schema.name in SENDING:
            self.on_collective(func._schema.name, args)
        if func.namespace == "fsdp" and not self.stream and self._paths is not None:
            self.events.append(copy_cost(func, args, kwargs, path))

    def _wait(self, tensor: Tensor) -> Tensor:
        """What a functional collective gave, once it is there: only the fake kernel makes a new
        tensor."""
        if self.on_wait is not None:
            self.on_wait()
        self.running = ""
        return tensor

    def resized(self, storage: Any) -> None:
        """A storage that lives on has memory from here on, or has given back what it had."""
        address, num_bytes = storage._cdata, storage.nbytes()
        known = self._alive.pop(address, None)
        if known is not None:
            self.values.release(address)
            self.events.append(Freed(known[0]))
        if num_bytes and address not in self._host:
            self._allocate(storage, "unsharded weights", self._path())
            self._tag(address, "parameters")

    def note(self, tree: Any, label: str, path: str = "") -> None:
        """Counts the storages of all tensors in `tree` that are not yet known."""
        for tensor in tensors_in(tree):
            self.add(tensor, label, path)

    def add(self, tensor: Tensor, label: str, path: str = "") -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive or address in self._host or storage.nbytes() == 0:
            return
        if self.optimizing and self.scalars_on_host and _is_made_scalar(tensor, label):
            self.note_host([tensor])
            return
        self._allocate(storage, label, path)

    def _allocate(self, storage: Any, label: str, path: str) -> None:
        address = storage._cdata
        number, self._next = self._next, self._next + 1
        self._alive[address] = (number, weakref.ref(storage, partial(self._free, address)))
        self.events.append(Allocated(number, storage.nbytes(), label, path, self.stream))

    def _copied(self, storage: Any, whole: Tensor, path: str) -> Tensor | None:
        """The copy of a gradient, which takes the place of `storage` unless that has more."""
        if storage.nbytes() > whole.nbytes or storage._cdata not in self._alive:
            return whole
        number, reference = self._alive[storage._cdata]
        made, self._next = self._next, self._next + 1
        self._alive[storage._cdata] = made, reference
        self.events.append(Allocated(made, whole.nbytes, "aten.new_zeros.default", path))
        self.events.append(Freed(number))
        return None

    def note_host(self, tensors: Iterable[Tensor]) -> None:
        """These live on the host in a GPU run: they are never counted."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address not in self._alive:
                self._host[address] = weakref.ref(storage, partial(self._forget, address))

    def tag(
        self, tensors: Iterable[Tensor], category: Category, weight: Tensor | None = None
    ) -> None:
        """From here on the storages of `tensors` count as `category` (with `paths` only), as
        gradients of `weight` where one is given."""
        if self._paths is None:
            return
        of = None if weight is None else self._alive.get(weight.untyped_storage()._cdata)
        for tensor in tensors:
            self._tag(tensor.untyped_storage()._cdata, category, of[0] if of else 0)

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """What is made within counts as `label`, and costs what `compute` says of it."""
        self._label = label
        try:
            yield
        finally:
            self._label = ""

    def compute(self, name: str, dtype: str, num_bytes: int) -> None:
        """A kernel that is not seen: it moves `num_bytes`."""
        if self._paths is not None:
            kind = kind_of(name.removeprefix("aten."))
            self.events.append(Computed(name, kind, dtype, 0, num_bytes, 1, self._path()))

    def send(
        self, collective: Collective, num_bytes: int, dtype: str, group: Group, *, follows: bool
    ) -> int:
        """A collective is handed over; the handle by which it is awaited."""
        self.num_collectives += 1
        handle = self.num_collectives
        self.events.append(Sent(handle, collective, num_bytes, dtype, group, follows, self._path()))
        return handle

    def wait(self, handle: int) -> None:
        self.events.append(Awaited(handle))

    def mark(self, phase: str, step: int) -> None:
        self.events.append(Marked(phase, step))

    def is_on_device(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._host

    def to_host(self, flat: Tensor) -> Tensor:
        """A copy of `flat` in the host's memory."""
        return self._copy(flat, TO_HOST)

    def to_device(self, flat: Tensor, device: torch.device) -> Tensor:
        """A copy of `flat`, which is on the host, on the device."""
        copied = self._copy(flat, TO_DEVICE)
        self.tag([copied], "activations")
        return copied

    def _copy(self, flat: Tensor, name: str) -> Tensor:
        self._transfer = name
        copied: Tensor = aten._to_copy.default(flat)
        self._transfer = ""
        return copied

    def _is_result_on_host(self, tree: Any) -> bool:
        return self._transfer == TO_HOST or (not self._transfer and self._all_on_host(tree))

    def _all_on_host(self, tree: Any) -> bool:
        tensors = tensors_in(tree)
        return bool(tensors) and all(t.untyped_storage()._cdata in self._host for t in tensors)

    def _read(self, tensor: Tensor) -> float | int | bool:
        """The value of one element. The optimizer's scalars may be anything; elsewhere it must not
        depend on data."""
        self.running = ""  # it ends here: what raises next is not this
        if self.optimizing:
            return 10.0 if tensor.is_floating_point() else 10
        value = self.values.read(tensor)
        if value is None:
            raise data_read(".item(), float(t), 'if t:'")
        return value

    def _note_work(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, path: str
    ) -> None:
        self._note_recomputation(result)
        work = cost_of(func, args, kwargs, result, path)
        if work is not None:
            self.events.append(work)
        node = torch._C._current_autograd_node()
        of_gradient = node is not None and node.name() == _ACCUMULATE_GRAD
        if of_gradient and not self.optimizing:
            self.tag(tensors_in(result), "gradients", node.variable)  # type: ignore[attr-defined]

    def _note_recomputation(self, result: Any) -> None:
        """Checkpointing runs a forward within the backward: what that leaves alive is saved."""
        if torch._C._current_graph_task_id() == -1:
            return
        if torch.is_grad_enabled():
            self._recomputed += [weakref.ref(t.untyped_storage()) for t in tensors_in(result)]
            return
        alive = [storage() for storage in self._recomputed]
        self._recomputed.clear()
        for address in {storage._cdata for storage in alive if storage is not None}:
            if address in self._alive and self._alive[address][0] not in self._tagged:
                self._tag(address, "activations")

    def _tag(self, address: int, category: Category, weight: int = 0) -> None:
        known = self._alive.get(address)
        if known is not None:
            self._tagged.add(known[0])
            self.events.append(Tagged(known[0], category, weight))

    def _forget(self, address: int, _: Any) -> None:
        del self._host[address]
        self.values.release(address)

    def _free(self, address: int, _: Any) -> None:
        number, _ = self._alive.pop(address)
        self.values.release(address)
        self.events.append(Freed(number))


def _is_made_scalar(tensor: Tensor, label: str) -> bool:
    """A scalar made out of nothing, as `torch.zeros(())`, and not computed from other tensors."""
    return tensor.dim() == 0 and label.startswith(_FACTORIES)


_FACTORIES = (
    "unseen", "aten.zeros.", "aten.ones.", "aten.full.", "aten.scalar_tensor.", "aten.lift_fresh.",
    "aten.empty.",
)  # fmt: skip
