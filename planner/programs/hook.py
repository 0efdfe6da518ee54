"""What each Python process of an emulated program writes down: its steps, its peaks, and torch's
own snapshots of its allocator there. `emulated.py` reads it.

Python imports a copy of this file, as `sitecustomize.py`, before anything of the program, whatever
Python that runs in. So it needs the standard library only, and looks at torch once the program has
imported it. Its own faults never reach the program: the first few are written into the record.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gzip
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

FOLDER, STEPS = (f"PLANNER_EMULATE_{name}" for name in ("FOLDER", "STEPS"))
MAX_EVENTS = 400_000  # of the allocator's history, more than a step has
# How much higher than the last a peak is, after the first steps, that is written.
PEAK_RISE = 17 / 16
MAX_FRAMES = 80  # of a stack: the user's own come last, after a trainer's
SETTLED_STEP = 3  # from this step's end on, what is alive should not grow
# How the names of files end: a process's steps, a line each (step, the most bytes that it used of a
# device, requested bytes that are alive, bytes reserved), and snapshots, named by their moment.
STEPPED, SNAPSHOT = ".step", ".pickle.gz"
OUT_OF_MEMORY = "out-of-memory"
LOADED = "loaded"  # the file that exists once a Python of the program has loaded this one
MIN_GROWTH_STEPS = 8  # before growth is looked for
MAX_ERROR = 600  # characters of the error that ended the program
MAX_CAUGHT_EXITS = 3  # times that a program may catch its end, as with a bare `except:`
ENDING_SECONDS = 30.0  # that threads and workers of a program get to end
RANKS = "RANK", "LOCAL_RANK"  # torchrun sets both, Lightning the second
WITH_GLOO = "cpu:gloo,cuda:nccl"  # a backend of torch.distributed
# The attribute that holds the user's module: of DDP, of torch.compile, and of FSDP 1.
WRAPPERS = "module", "_orig_mod", "_fsdp_wrapped_module"
NODE = "planner_module"  # the key in the metadata of autograd's nodes
MAX_DEPTH = 3  # of containers in which a module's tensors are looked for
MAX_MARKS = 100_000

Stack = list[tuple[str, int, str]]  # (file, line, function), innermost first


class Record:
    """What is written down of one process: `values`, after each step that changed them."""

    remember: Callable[..., None]  # torch's own `_record_memory_history`
    modules: Modules | None = None

    def __init__(self, torch: Any, folder: Path, steps: int) -> None:
        self.torch, self.folder, self.steps = torch, folder, steps
        self.pid = os.getpid()
        self.counts: dict[int, int] = {}  # steps by optimizer
        self.settled_bytes = 0
        self.num_exits = 0
        self.dumped: dict[int, int] = {}  # device: its highest peak that has a snapshot
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.selections = 0  # by values, that all kernels made until the first step's end
        self.values: dict[str, Any] = {
            "pid": self.pid, "rank": None, "steps": 0,
            "peaks": {}, "out_of_memory": None, "grown_at": 0, "selects": False,
            "is_trained": False, "is_evaluated": False, "is_cut": False, "error": "", "faults": [],
        }  # fmt: skip

    def begin(self) -> None:
        """CUDA has been initialised in this process."""
        if os.getpid() != self.pid:  # a fork that begins anew
            vars(self).update(vars(Record(self.torch, self.folder, self.steps)))
        cuda = self.torch.cuda
        self.remember("all", context="alloc", stacks="python", max_entries=MAX_EVENTS)
        self.torch._C._cuda_attach_out_of_memory_observer(surviving(self, self.run_out))
        for home in (cuda, cuda.memory):  # a peak is written down before a program resets it
            home.reset_peak_memory_stats = self.before(home.reset_peak_memory_stats)
        hooks = importlib.import_module("torch.optim.optimizer")
        hooks.register_optimizer_step_post_hook(lambda optimizer, *_: self.stepped(optimizer))
        hook = sys.excepthook
        note = surviving(self, self.note_error)
        sys.excepthook = lambda kind, error, trace: (note(error), hook(kind, error, trace))[1]
        atexit.register(surviving(self, self.end))
        self.write()

    def watch_modules(self) -> None:
        if hasattr(self.torch._C, "_cuda_setMemoryMetadata"):  # older torch has none
            self.modules = Modules(self.torch)

    def before(self, reset: Callable[..., None]) -> Callable[..., None]:
        def measure_and_reset(*arguments: Any, **named: Any) -> None:
            surviving(self, self.measure)()
            reset(*arguments, **named)

        return measure_and_reset

    def see_gradients(self, optimizer: Any) -> None:
        self.values["is_trained"] = self.values["is_trained"] or any(
            p.grad is not None for group in optimizer.param_groups for p in group["params"]
        )

    def note_error(self, error: BaseException) -> None:
        self.values["error"] = f"{type(error).__name__}: {error}"[:MAX_ERROR]

    def stepped(self, optimizer: object) -> None:
        surviving(self, self.see_gradients)(optimizer)
        if not self.num_exits:
            surviving(self, self.note_step)(optimizer)
        if self.steps and self.values["steps"] >= self.steps:
            self.leave()

    def note_step(self, optimizer: object) -> None:
        self.counts[id(optimizer)] = self.counts.get(id(optimizer), 0) + 1
        step = max(self.counts.values())
        if step == self.values["steps"]:  # a second optimizer of the same step
            return
        self.values["steps"] = step
        if step == 1:
            self.selections = self.driver.emulated_selections()
        self.measure()
        cuda, devices = self.torch.cuda, self.devices()
        peaks = self.values["peaks"].values()
        used = max((p["reserved_bytes"] + p["outside_bytes"] for p in peaks), default=0)
        # Requested bytes, since a block that is used anew may be larger.
        alive = sum(cuda.memory_stats(d)["requested_bytes.all.current"] for d in devices)
        reserved = sum(map(cuda.memory_reserved, devices))
        with (self.folder / f"{self.pid}{STEPPED}").open("a") as file:
            file.write(f"{step} {used} {alive} {reserved}\n")
        if step == SETTLED_STEP:
            self.settled_bytes = alive
            self.dump("settled")
        elif alive > self.settled_bytes and step >= MIN_GROWTH_STEPS and step & (step - 1) == 0:
            self.values["grown_at"] = step
            self.dump("grown")
        self.write()

    def dump(self, moment: str) -> None:
        """Writes torch's snapshot of its allocator, and what our marks in it mean."""
        snapshot = self.torch.cuda.memory._snapshot()
        snapshot["marks"] = self.modules.marks if self.modules is not None else []
        part = self.folder / f"{self.pid}.part"
        with gzip.open(part, "wb", compresslevel=1) as file:
            pickle.dump(snapshot, file)
        part.replace(self.folder / f"{self.pid}-{moment}{SNAPSHOT}")

    def devices(self) -> list[int]:
        cuda = self.torch.cuda
        return [d for d in range(cuda.device_count()) if cuda.memory_reserved(d)]

    def measure(self, is_end: bool = False) -> None:
        """Notes the peaks of each device, with a snapshot at a new one."""
        cuda = self.torch.cuda
        for device in self.devices():
            peak = self.values["peaks"].setdefault(str(device), {"allocated_bytes": 0})
            allocated, reserved = (
                cuda.max_memory_allocated(device),
                cuda.max_memory_reserved(device),
            )
            free, total = cuda.mem_get_info(device)
            outside = total - free - cuda.memory_reserved(device)
            peak.update(
                name=cuda.get_device_name(device), total_bytes=total,
                reserved_bytes=max(reserved, peak.get("reserved_bytes", 0)),
                outside_bytes=max(outside, peak.get("outside_bytes", 0)),
                retries=cuda.memory_stats(device).get("num_alloc_retries", 0),
            )  # fmt: skip
            if allocated > peak["allocated_bytes"]:
                step = self.values["steps"] + is_end
                peak.update(allocated_bytes=allocated, step=step)
            dumped = self.dumped.get(device, 0)
            is_due = is_end or self.values["steps"] <= SETTLED_STEP
            if peak["allocated_bytes"] > (dumped if is_due else dumped * PEAK_RISE):
                self.dumped[device] = peak["allocated_bytes"]
                self.dump(f"peak{device}")

    def run_out(self, device: int, requested: int, total: int, free: int) -> None:
        """torch is about to raise its out-of-memory error; everything is still alive. Only the
        first of several that a program catches is noted in full."""
        if self.values["out_of_memory"] is not None:
            self.values["out_of_memory"]["times"] += 1
            self.write()
            return
        self.values["out_of_memory"] = {
            "times": 1, "device": device, "requested_bytes": requested, "total_bytes": total,
            "free_bytes": free, "step": self.values["steps"] + 1,
            "allocated_bytes": self.torch.cuda.memory_allocated(device),
            "reserved_bytes": self.torch.cuda.memory_reserved(device),
            "forwards": getattr(self.modules, "forwards", 0),
        }  # fmt: skip
        self.dump(OUT_OF_MEMORY)
        self.write()

    def end(self) -> None:
        if os.getpid() == self.pid:
            self.measure(is_end=True)
            self.write()

    def leave(self) -> None:
        """Ends the program as if it had come to its end, even where a thread of it would not end;
        and again at its next step, where it caught that."""
        self.num_exits += 1
        if self.num_exits == 1:
            self.values["is_cut"] = True
            surviving(self, self.write)()
            timer = threading.Timer(ENDING_SECONDS, os._exit, [0])
            timer.daemon = True
            timer.start()
        if self.num_exits > MAX_CAUGHT_EXITS:
            try:
                atexit._run_exitfuncs()
                sys.stdout.flush()
            finally:
                os._exit(0)
        raise SystemExit(0)

    def write(self) -> None:
        """Writes `values`. The rank is torch's, kept once its process group is gone; before there
        is a group, the launcher's."""
        distributed = self.torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            self.values["rank"] = distributed.get_rank()
        elif self.values["rank"] is None:
            ranks = (os.environ.get(name, "") for name in RANKS)
            self.values["rank"] = next((int(rank) for rank in ranks if rank.isdigit()), None)
        self.values["is_evaluated"] = getattr(self.modules, "is_evaluated", False)
        self.values["selects"] = self.driver.emulated_selections() > self.selections
        path = self.folder / f"{self.pid}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.values))
        part.replace(path)


def surviving(record: Record, function: Callable[..., None]) -> Callable[..., None]:
    """`function`, whose own errors are written down and go no further."""

    def survive(*arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            if len(record.values["faults"]) < 3:
                record.values["faults"].append(f"{type(error).__name__}: {error}"[:300])
                with contextlib.suppress(Exception):
                    record.write()

    return survive


def current_stack() -> Stack:
    """The Python code of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    stack: Stack = []
    while frame is not None and len(stack) < MAX_FRAMES:
        code = frame.f_code
        stack.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return stack


class AfterTorch(importlib.abc.MetaPathFinder):
    """A finder of modules that calls `attach` once the program has imported torch."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_attach(module: ModuleType) -> None:
                sys.meta_path.remove(self)
                execute(module)
                with contextlib.suppress(Exception):
                    attach(module)

            spec.loader.exec_module = execute_and_attach  # type: ignore[method-assign]
        return spec  # also of a program that only asks whether there is a torch


def attach(torch: Any) -> None:
    record = Record(torch, Path(os.environ[FOLDER]), int(os.environ.get(STEPS) or 0))
    record.remember = torch.cuda.memory._record_memory_history
    surviving(record, record.watch_modules)()
    put_gloo_beside(torch.distributed)
    # A program that begins a history anew, or stops it, would end ours. Its snapshots hold ours.
    torch.cuda.memory._record_memory_history = lambda *_, **__: None
    torch.cuda._lazy_call(surviving(record, record.begin))


def put_gloo_beside(distributed: Any) -> None:
    """Gives NCCL's process groups gloo for tensors on the host, as groups without a named backend
    have it: torch then sends objects and waits at barriers by gloo. On emulated devices no bytes
    move, and no kernel adds up the sizes of objects."""
    if not distributed.is_available():
        return
    c10d = distributed.distributed_c10d

    def with_gloo(make_group: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make_group)
        def make_with_gloo(*arguments: Any, **named: Any) -> Any:
            call = inspect.signature(make_group).bind(*arguments, **named)
            if call.arguments.get("backend") == "nccl":
                call.arguments["backend"] = WITH_GLOO
            return make_group(*call.args, **call.kwargs)

        return make_with_gloo

    def get_backend(group: Any = None) -> str:
        return str(torch_get_backend(group)).replace(WITH_GLOO, "nccl")

    torch_get_backend = c10d.get_backend
    changed = {name: with_gloo(getattr(c10d, name)) for name in ("init_process_group", "new_group")}
    for home in (distributed, c10d):
        vars(home).update(changed, get_backend=get_backend)


def customize() -> None:
    """At Python's start: runs the user's own sitecustomize, which this file hides, and then begins
    ours. The file stays on sys.path, which some programs hand to the processes that they start."""
    others = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    theirs = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if theirs is not None and theirs.loader is not None:
        theirs.loader.exec_module(importlib.util.module_from_spec(theirs))
    sys.meta_path.insert(0, AfterTorch())
    with contextlib.suppress(OSError):
        (Path(os.environ[FOLDER]) / LOADED).touch()


class Within(threading.local):
    """The modules that a thread is running, the innermost last."""

    def __init__(self) -> None:
        self.path: list[str] = []


class Modules:
    """Which module requests memory, in forward and backward: torch's allocator writes a mark of
    ours beside each request. A mark is a number, the index into `marks`: (module, whether in
    backward, where backward was called). No tensor is kept. Torch's hooks would change what is
    compiled, so Module.__call__ is replaced instead."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.marks: list[tuple[str, bool, Stack]] = []
        self.numbers: dict[tuple[str, bool, tuple[Any, ...]], str] = {}
        self.within = Within()
        self.backward_at: Stack = []
        self.forwards = 0  # of outermost modules, kept for a backward that has not come yet
        self.is_evaluated = False  # whether a module with parameters ran without gradients
        self.set_mark = torch._C._cuda_setMemoryMetadata
        module = torch.nn.Module
        call, run = module.__call__, torch.autograd._engine_run_backward

        def call_marked(this: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(this, *args, **kwargs)
            path = self.within.path
            outer = path[-1] if path else ""
            self.claim((args, kwargs), outer)  # whoever made an input runs after this backward
            path.append(self.name(this, outer))
            self.mark(path[-1])
            try:
                result = call(this, *args, **kwargs)
                self.claim(result, path[-1])
            finally:
                path.pop()
                self.mark(outer)
            return result

        def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            self.backward_at, self.forwards = current_stack(), 0
            self.claim(roots, "")
            return run(roots, *args, **kwargs)

        module.__call__ = call_marked
        torch.autograd._engine_run_backward = run_backward
        hook = sys.excepthook

        def print_theirs(kind: Any, error: BaseException, trace: TracebackType | None) -> None:
            cause: BaseException | None = error  # and each error that it was raised from
            while cause is not None:
                cause.__traceback__ = without_ours(cause.__traceback__)
                cause = cause.__cause__ or cause.__context__
            hook(kind, error, without_ours(trace))

        sys.excepthook = print_theirs
        if dynamo := sys.modules.get("torch._dynamo.utils"):  # it takes ours for torch's own
            dynamo.unpatched_nn_module_call = call_marked  # type: ignore[attr-defined]

    def name(self, module: Any, outer: str) -> str:
        with contextlib.suppress(Exception):  # a module may be scripted, or not to be hashed
            if not outer and not self.is_backward():
                self.enter_outermost(module)
            return self.names[module]
        return f"{outer}.{type(module).__name__}".lstrip(".")

    def enter_outermost(self, module: Any) -> None:
        torch = self.torch
        if module not in self.names:
            self.register(module)
        if next(module.parameters(), None) is not None:
            self.forwards += torch.is_grad_enabled()
            self.is_evaluated |= not (torch.is_grad_enabled() and module.training)

    def register(self, module: Any) -> None:
        """Names the whole tree under an outermost module, after the class of the module that its
        wrappers hold."""
        outside = [module]
        while inner := next((i for w in WRAPPERS if (i := module._modules.get(w))), None):
            outside.append(module := inner)
        root = type(module).__name__.removeprefix("FSDP")  # fully_shard changes classes
        self.names.update(dict.fromkeys(outside, root))
        for name, part in module.named_modules():
            self.names[part] = f"{root}.{name}".replace("._orig_mod", "").rstrip(".")

    def claim(self, values: Any, path: str) -> None:
        """The autograd nodes that made the tensors in `values` belong to the module `path` when
        they run backward, unless a module further in has claimed them before."""
        with contextlib.suppress(Exception):
            for tensor in tensors(values, self.torch.Tensor):
                node = tensor.grad_fn
                if node is not None and NODE not in node.metadata:
                    node.metadata[NODE] = path
                    node.register_prehook(lambda *_: self.mark(path, is_node=True))

    def is_backward(self) -> bool:
        return bool(self.torch._C._current_graph_task_id() != -1)

    def mark(self, path: str, is_node: bool = False) -> None:
        """Marks what this thread requests from now on."""
        with contextlib.suppress(Exception):
            is_backward = is_node or self.is_backward()
            at = self.backward_at if is_backward else []
            key = path, is_backward, tuple(at)
            number = self.numbers.get(key)
            if number is None and len(self.marks) < MAX_MARKS:
                number = self.numbers[key] = str(len(self.marks))
                self.marks.append((path, is_backward, at))
            self.set_mark(number or "")


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    if trace is not None:
        trace.tb_next = without_ours(trace.tb_next)
    return trace


def tensors(value: Any, kind: type, depth: int = MAX_DEPTH) -> Iterator[Any]:
    """The tensors (instances of `kind`) in a value, and in the containers that it is made of."""
    if isinstance(value, kind):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for item in items:
            yield from tensors(item, kind, depth - 1)


if __name__ == "sitecustomize" and FOLDER in os.environ:
    customize()
