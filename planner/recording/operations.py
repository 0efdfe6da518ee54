"""What a step computes: a step of its own under a dispatch mode, on the device's own tensors.

Memory is recorded over other steps, without the mode: under it autograd sums gradients out of place
(torch's isTensorSubclassLike), and compiled code does not run. Both have the same phases, so that
the requests of the one get the names of the other's operations.
"""

import ctypes
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

import planner
from planner.core.schema import TrainSetting
from planner.core.schema.record import Phase
from planner.ledger.ledger import (
    COMPILED_CALL,
    GRADIENT_TO_HOST,
    IN_BACKWARD,
    OPTIMIZER_CALL,
    TO_DEVICE,
    TO_HOST,
    WEIGHT_TO_DEVICE,
    Computed,
    Event,
    OperationKind,
)
from planner.memory.compiled import EXTERN_PREFIX, FUSED_PREFIX
from planner.recording import costs
from planner.recording.history import UNSHARDED, Entry, Marks, marked, write_beside

SELECTS = (
    "its steps select by values, which nothing computed: as few as can be were selected, so that "
    "the figures are a lower bound"
)
READS = "its steps read a value at {}, which nothing computed: 0 stands for it"
COLLECTIVES = frozenset(("c10d", "_c10d_functional", "prim"))
# No person would mend a frame in these folders.
_NOT_THEIRS = tuple(str(Path(package.__file__ or "").parent) + "/" for package in (torch, planner))
OURS = "the training step"  # the place of a call that no other code makes
AHEAD = 24  # requests among which one of a size is looked for, where two steps differ


class Operations(TorchDispatchMode):
    """The operations of a step; of a compiled one the kernels that Inductor launches, and what it
    calls besides.

    `phases` are (phase, its work), in order. `names` are the names of all operations, by the
    numbers that are written beside the entries of the allocator's history."""

    def __init__(self, module: torch.nn.Module, setting: TrainSetting) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.supports_higher_order_operators = True
        self.modules = Marks(write=lambda text: None)
        self.modules.name(module)
        self.collectives = costs.Collectives(setting, lambda event: self.work.append(event))
        self.phases: list[tuple[str, list[Event]]] = []
        self.names: list[str] = []
        self.work: list[Event] = []
        self.num_selections = ctypes.CDLL("libcuda.so.1").emulated_selections
        self.is_selecting = False
        self.reads: set[str] = set()  # the places where a model reads values
        self.offloads = setting.offload_optimizer != "none"
        self.is_updating = False
        self.paths: dict[int, str] = {}  # of a node of autograd, by its number
        self.prefix = "aten."  # of the names of operations; within a compiled graph EXTERN_PREFIX

    def end(self, phase: Phase) -> None:
        """Ends a phase."""
        if phase == "backward":
            self.collectives.end_backward()
        self.phases.append((phase, self.work))
        self.work = []
        write_beside(f"{len(self.phases)}|")

    @property
    def notes(self) -> tuple[str, ...]:
        """What stands for values, which nothing computes."""
        reads = (READS.format(place) for place in sorted(self.reads))
        return (SELECTS, *reads) if self.is_selecting else tuple(reads)

    def watch(self, optimizers: Iterable[Any]) -> None:
        """Marks the steps of optimizers, so that those in backward are told apart."""

        def enter(*_: object) -> None:
            self.is_updating = True
            if self._is_backward():
                call = Computed(OPTIMIZER_CALL, "pointwise", "float32", 0, 0, 0, IN_BACKWARD)
                self.work.append(call)

        def leave(*_: object) -> None:
            self.is_updating = False

        for optimizer in optimizers:
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # torchao's has none
                optimizer.register_step_pre_hook(enter)
                optimizer.register_step_post_hook(leave)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets functions that are compiled already run so under this mode."""
        return True

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Within, also what passes no dispatch mode is heard: the launches of Inductor's kernels,
        streams that wait, and storages that FSDP2 gives memory again."""
        from torch._inductor.output_code import CompiledFxGraph
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        launch: Any = CachingAutotuner.run
        call: Any = CompiledFxGraph.__call__
        resize: Any = torch.UntypedStorage.resize_

        def hear_launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("benchmark_run"):
                self._name(f"{FUSED_PREFIX}{kernel.fn.__name__.removeprefix(FUSED_PREFIX)}")
                tensors = dict(zip(kernel.triton_meta["signature"], args, strict=False))
                self.work.append(_fused_cost(self.names[-1], tensors, self._path()))
            return launch(kernel, *args, **kwargs)

        def hear_call(graph: Any, *args: Any) -> Any:
            if self.is_updating:
                self.work.append(Computed(COMPILED_CALL, "pointwise", "float32", 0, 0, 0, ""))
            with mock.patch.object(self, "prefix", EXTERN_PREFIX):
                self._name(f"{self.prefix}empty_strided")  # until its first kernel
                return call(graph, *args)

        def hear_resize(storage: torch.UntypedStorage, size: int) -> Any:
            self._name(UNSHARDED)
            return resize(storage, size)

        with (
            mock.patch.object(CachingAutotuner, "run", hear_launch),
            mock.patch.object(CompiledFxGraph, "__call__", hear_call),
            mock.patch.object(torch.UntypedStorage, "resize_", hear_resize),
            self.collectives.listening(),
            self.modules.writing(),
        ):
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):  # it runs an operation: run_with_rng
            func, args = args[0], args[1:]
            kwargs.pop("rng_state")
        self._name(f"{self.prefix}{func._overloadpacket.__name__}")
        if func.namespace in COLLECTIVES:
            self.collectives.hear(func, args, self._path())
            return func(*args, **kwargs)
        is_beside = torch.cuda.current_stream().cuda_stream != costs.COMPUTING
        self.collectives.touch(costs.tensors_in((args, kwargs)), is_beside)
        before = self.num_selections()
        result = func(*args, **kwargs)
        self.is_selecting |= self.num_selections() > before and _has_size_of_values(func, args)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_cuda:
            self.reads |= {place(traceback.extract_stack())} - {OURS}
        work = self._cost(func, args, kwargs, result, is_beside)
        if work is not None and (work.kind == "transfer" or not is_beside):
            self.work.append(work)
        return result

    def _name(self, name: str) -> None:
        """Names the operation that requests memory from here on."""
        self.names.append(name)
        write_beside(f"{len(self.phases)}|{len(self.names) - 1}")

    def _cost(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, is_beside: bool
    ) -> Computed | None:
        tensors = costs.tensors_in((args, kwargs, result))
        if not any(tensor.is_cuda for tensor in tensors):
            return None
        path = self._path()
        on_host = any(not tensor.is_cuda and tensor.numel() > 1 for tensor in tensors)
        if on_host and func._overloadpacket.__name__ in ("copy_", "_to_copy"):
            copy = costs.tensors_in(result)[0]
            if is_beside and self.offloads and copy.is_cuda:
                return costs.transfer_cost(WEIGHT_TO_DEVICE, copy, path)
            if is_beside and self.offloads:
                return costs.transfer_cost(GRADIENT_TO_HOST, copy, IN_BACKWARD)._replace(kernels=0)
            return costs.transfer_cost(TO_DEVICE if copy.is_cuda else TO_HOST, copy, path)
        if func.namespace == "fsdp":
            return costs.copy_cost(func, args, kwargs, path)
        return costs.cost_of(func, args, kwargs, result, path)

    def _path(self) -> str:
        """The module that runs. In backward, where none runs unless it is recomputed, the one whose
        forward made the node of autograd that runs: the node of an operation has the number before
        the one that autograd gives next."""
        running = self.modules.current()
        if not self._is_backward():
            self.paths.setdefault(torch._C._autograd._get_sequence_nr() - 1, running)
        elif self.is_updating:
            return IN_BACKWARD
        elif not running and (node := torch._C._current_autograd_node()) is not None:
            return self.paths.get(node._sequence_nr(), "")
        return running

    @staticmethod
    def _is_backward() -> bool:
        return bool(torch._C._current_graph_task_id() != -1)


def _has_size_of_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the size of a result depends on values, for an operation whose kernels selected by
    values. An `index_put` that sums sorts its indices, which are as many whatever they are."""
    is_put = func._overloadpacket.__name__ in ("index_put", "index_put_", "_index_put_impl_")
    return not is_put or any(
        t.dtype in (torch.bool, torch.uint8) for t in costs.tensors_in(args[1])
    )


def _fused_cost(name: str, arguments: Mapping[str, Any], path: str) -> Computed:
    """The work of a kernel that reads and writes each tensor of its arguments once, and computes
    about once for each element of the largest."""
    tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    moved = sum(costs.moved_bytes(t) * (1 + n.startswith("in_out")) for n, t in tensors.items())
    written = [t for n, t in tensors.items() if "out" in n] or [*tensors.values()]
    kind: OperationKind = "reduction" if "_red_" in name or "_per_" in name else "pointwise"
    dtype = str(written[0].dtype).removeprefix("torch.") if written else "float32"
    largest = max((t.numel() for t in tensors.values()), default=0)
    return Computed(name, kind, dtype, largest, moved, 1, path)


def place(frames: Iterable[traceback.FrameSummary]) -> str:
    """`file:line` of the innermost frame outside torch and this package."""
    outside = [f for f in frames if not f.filename.startswith((*_NOT_THEIRS, "<"))]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else OURS


def name_requests(
    plain: Iterable[Entry], watched: Iterable[Entry], names: Sequence[str], per_step: int,
    num_steps: int,
) -> Mapping[int, Sequence[str]]:  # fmt: skip
    """The operation behind each request of the `plain` history, by the number of phases that had
    ended: that of the request of the same size in the same phase and order of the `watched` step.
    Each of `num_steps` has `per_step` phases; before the first the module is built, and after the
    last it may be validated."""
    named: dict[int, list[tuple[int, str]]] = {}
    unnamed: dict[int, list[int]] = {}
    name = ""
    for ended, place, entry in marked(watched):
        if entry["user_metadata"]:
            name = names[int(place)] if place else ""
        if entry["action"] == "alloc":
            named.setdefault(ended, []).append((entry["size"], name))
    for ended, _, entry in marked(plain):
        if entry["action"] == "alloc" and ended:
            unnamed.setdefault(ended, []).append(entry["size"])
    return {
        n: _align(sizes, named.get((n - 1) % per_step if n <= num_steps * per_step else n - 1
                                     - (num_steps - 1) * per_step, []))
        for n, sizes in unnamed.items()
    }  # fmt: skip


def _align(sizes: Iterable[int], named: Sequence[tuple[int, str]]) -> list[str]:
    """The name of each size: of the next named request that has it, among AHEAD; else ""."""
    names, start = [], 0
    for size in sizes:
        ahead = range(start, min(start + AHEAD, len(named)))
        match = next((n for n in ahead if named[n][0] == size), None)
        names.append("" if match is None else named[match][1])
        start = start if match is None else match + 1
    return names
