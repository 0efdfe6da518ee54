"""What a step computes: a step of its own under a dispatch mode, on the device's own tensors.

A dispatch mode makes autograd sum gradients out of place (torch's isTensorSubclassLike), and code
that torch compiled does not run under one: so memory is recorded over steps without it. Both agree
on phases, and the requests of one are named by the other's operations.
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
from planner.memory.compiled import FUSED_PREFIX
from planner.recording.costs import (
    COMPUTING,
    Collectives,
    copy_cost,
    cost_of,
    moved_bytes,
    tensors_in,
    transfer_cost,
)
from planner.recording.history import UNSHARDED, Entry, Marks, marked, write_beside

SELECTS = (
    "its steps select by values, which nothing computed: as few as can be were selected, so that "
    "the figures are a lower bound"
)
READS = "its steps read a value at {}, which nothing computed: 0 stands for it"
COLLECTIVES = frozenset(("c10d", "_c10d_functional", "prim"))
# Frames in these are not what a person would mend.
_OTHERS = tuple(str(Path(package.__file__ or "").parent) + "/" for package in (torch, planner))
OURS = "the training step"  # a place that no one else's code is called from
AHEAD = 24  # requests of one size that are looked for, where two steps differ


class Operations(TorchDispatchMode):
    """Of a step that is compiled the kernels that Inductor launches count, and what it calls
    besides. `phases` are (phase, what it computed), in order; `names` are those of all operations,
    by the numbers that are written beside the entries of the allocator's history."""

    def __init__(self, module: torch.nn.Module, setting: TrainSetting) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.supports_higher_order_operators = True
        self.modules = Marks(write=lambda text: None)
        self.modules.name(module)
        self.collectives = Collectives(setting, lambda event: self.now.append(event))
        self.phases: list[tuple[str, list[Event]]] = []
        self.names: list[str] = []
        self.now: list[Event] = []
        self.num_selections = ctypes.CDLL("libcuda.so.1").emulated_selections
        self.is_selecting = False
        self.reads: set[str] = set()  # where a model reads values
        self.offloads = setting.offload_optimizer != "none"
        self.is_updating = False
        self.write = write_beside

    def end(self, phase: str) -> None:
        """A phase has ended."""
        if phase == "backward":
            self.collectives.end_backward()
        self.phases.append((phase, self.now))
        self.now = []
        self.write(f"{len(self.phases)}|")

    @property
    def notes(self) -> tuple[str, ...]:
        """What was made up in the place of values, which nothing computes."""
        said = [SELECTS] if self.is_selecting else []
        return (*said, *(READS.format(place) for place in sorted(self.reads)))

    def watch(self, optimizers: Iterable[object]) -> None:
        """Their steps are told apart where they run in backward."""

        def enter(*_: object) -> None:
            self.is_updating = True
            if self._is_backward():
                call = Computed(OPTIMIZER_CALL, "pointwise", "float32", 0, 0, 0, IN_BACKWARD)
                self.now.append(call)

        def leave(*_: object) -> None:
            self.is_updating = False

        for optimizer in optimizers:
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # torchao's on the host has none
                assert isinstance(optimizer, torch.optim.Optimizer)
                optimizer.register_step_pre_hook(enter)
                optimizer.register_step_post_hook(leave)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """So that what is compiled already runs so under this mode."""
        return True

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """What does not pass a dispatch mode is heard within: kernels that Inductor made as they
        are launched, streams that wait, and storages that FSDP2 gives memory anew."""
        from torch._inductor.output_code import CompiledFxGraph
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        usual: Any = CachingAutotuner.run

        def run(kernel: Any, *given: Any, **named: Any) -> Any:
            if not named.get("benchmark_run"):
                names = list(kernel.triton_meta["signature"])
                self._name(f"{FUSED_PREFIX}{kernel.fn.__name__.removeprefix(FUSED_PREFIX)}")
                self.now.append(_launched(self.names[-1], dict(zip(names, given, strict=False))))
            return usual(kernel, *given, **named)

        call: Any = CompiledFxGraph.__call__

        def called(graph: Any, *given: Any) -> Any:
            if self.is_updating:
                self.now.append(Computed(COMPILED_CALL, "pointwise", "float32", 0, 0, 0, ""))
            return call(graph, *given)

        resized: Any = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            self._name(UNSHARDED)
            return resized(storage, size)

        with (
            mock.patch.object(CachingAutotuner, "run", run),
            mock.patch.object(CompiledFxGraph, "__call__", called),
            mock.patch.object(torch.UntypedStorage, "resize_", resize),
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
        self._name(f"aten.{func._overloadpacket.__name__}")
        if func.namespace in COLLECTIVES:
            self.collectives.hear(func, args, self.modules.current())
            return func(*args, **kwargs)
        is_beside = torch.cuda.current_stream().cuda_stream != COMPUTING
        self.collectives.touch(tensors_in((args, kwargs)), is_beside)
        selected = self.num_selections()
        result = func(*args, **kwargs)
        self.is_selecting |= self.num_selections() > selected and _has_size_of_values(func, args)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_cuda:
            self.reads |= {place(traceback.extract_stack())} - {OURS}
        work = self._work(func, args, kwargs, result, is_beside)
        if work is not None and (work.kind == "transfer" or not is_beside):
            self.now.append(work)
        return result

    def _name(self, name: str) -> None:
        """What asks for memory from here on."""
        self.names.append(name)
        self.write(f"{len(self.phases)}|{len(self.names) - 1}")

    def _work(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, is_beside: bool
    ) -> Computed | None:
        tensors = tensors_in((args, kwargs, result))
        if not any(tensor.is_cuda for tensor in tensors):
            return None
        is_update = self.is_updating and self._is_backward()
        path = IN_BACKWARD if is_update else self.modules.current()
        on_host = any(not tensor.is_cuda and tensor.numel() > 1 for tensor in tensors)
        if on_host and func._overloadpacket.__name__ in ("copy_", "_to_copy"):
            made = tensors_in(result)[0]
            if is_beside and self.offloads and made.is_cuda:
                return transfer_cost(WEIGHT_TO_DEVICE, made, path)
            if is_beside and self.offloads:
                return transfer_cost(GRADIENT_TO_HOST, made, IN_BACKWARD)._replace(kernels=0)
            return transfer_cost(TO_DEVICE if made.is_cuda else TO_HOST, made, path)
        if func.namespace == "fsdp":
            return copy_cost(func, args, kwargs, path)
        return cost_of(func, args, kwargs, result, path)

    @staticmethod
    def _is_backward() -> bool:
        return bool(torch._C._current_graph_task_id() != -1)


def _has_size_of_values(func: Any, args: tuple[Any, ...]) -> bool:
    """What `func` takes, of which the emulated driver saw that it selects by values: all but an
    `index_put` that sums, whose sorted indices are as many whatever they are."""
    is_put = func._overloadpacket.__name__ in ("index_put", "index_put_", "_index_put_impl_")
    return not is_put or any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))


def _launched(name: str, given: Mapping[str, Any]) -> Computed:
    """A kernel that reads and writes each of its tensors once, and computes about once for each
    element of its largest."""
    tensors = {argument: t for argument, t in given.items() if isinstance(t, torch.Tensor)}
    moved = sum(
        moved_bytes(t) * (2 if argument.startswith("in_out") else 1)
        for argument, t in tensors.items()
    )
    written = [t for argument, t in tensors.items() if "out" in argument] or [*tensors.values()]
    kind: OperationKind = "reduction" if "_red_" in name or "_per_" in name else "pointwise"
    dtype = str(written[0].dtype).removeprefix("torch.") if written else "float32"
    largest = max((t.numel() for t in tensors.values()), default=0)
    return Computed(name, kind, dtype, largest, moved, 1, "")


def place(frames: Iterable[traceback.FrameSummary]) -> str:
    """`file:line` of the innermost frame outside torch and this package."""
    outside = [f for f in frames if not f.filename.startswith((*_OTHERS, "<"))]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else OURS


def name_requests(
    plain: Iterable[Entry], watched: Iterable[Entry], names: Sequence[str], per_step: int,
    num_steps: int,
) -> Mapping[int, Sequence[str]]:  # fmt: skip
    """The operation behind each request of the `plain` history, by the number of phases ended: that
    of the `watched` step's request of the same size in the same phase and order. `per_step` phases
    make each of `num_steps`; before the first of them the module is built, and after the last it
    may be validated."""
    known: dict[int, list[tuple[int, str]]] = {}
    asked: dict[int, list[int]] = {}
    name = ""
    for ended, place, entry in marked(watched):
        if entry["user_metadata"]:
            name = names[int(place)] if place else ""
        if entry["action"] == "alloc":
            known.setdefault(ended, []).append((entry["size"], name))
    for ended, _, entry in marked(plain):
        if entry["action"] == "alloc" and ended:
            asked.setdefault(ended, []).append(entry["size"])
    return {
        n: _aligned(sizes, known.get((n - 1) % per_step if n <= num_steps * per_step else n - 1
                                     - (num_steps - 1) * per_step, []))
        for n, sizes in asked.items()
    }  # fmt: skip


def _aligned(sizes: Iterable[int], known: Sequence[tuple[int, str]]) -> list[str]:
    found, at = [], 0
    for size in sizes:
        ahead = range(at, min(at + AHEAD, len(known)))
        place = next((n for n in ahead if known[n][0] == size), None)
        found.append("" if place is None else known[place][1])
        at = at if place is None else place + 1
    return found
