"""Which module of a program asks for memory, forward and backward: torch's allocator writes a mark
of ours beside each request.

Beside `inside.py` in whatever Python the program runs: it needs the standard library only. No
tensor is kept, and no hook of torch is used, as these change what is compiled: Module.__call__ is.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

# The attribute that holds the user's module: of DDP, of torch.compile, and of FSDP 1.
WRAPPERS = "module", "_orig_mod", "_fsdp_wrapped_module"
NODE = "planner_module"  # the key in the metadata of autograd's nodes
MAX_DEPTH = 3  # of containers in which a module's tensors are looked for
MAX_MARKS = 100_000

Stack = list[tuple[str, int, str]]  # (file, line, function), innermost first


class Within(threading.local):
    """The modules that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.path: list[str] = []


class Modules:
    """`marks` are (module, whether in backward, where that was called), by their number: the text
    that the allocator's history holds."""

    def __init__(self, torch: Any, stack_here: Callable[[], Stack]) -> None:
        self.torch = torch
        self.names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.marks: list[tuple[str, bool, Stack]] = []
        self.numbers: dict[tuple[str, bool, tuple[Any, ...]], str] = {}
        self.within = Within()
        self.backward_at: Stack = []
        self.forwards = 0  # of outermost modules, kept for a backward that has not come yet
        self.is_evaluated = False  # whether one with parameters ran without gradients
        self.set_mark = torch._C._cuda_setMemoryMetadata
        module = torch.nn.Module
        call, run = module.__call__, torch.autograd._engine_run_backward

        def called(this: Any, *given: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(this, *given, **named)
            path = self.within.path
            outer = path[-1] if path else ""
            self.own((given, named), outer)  # who made an input runs when its backward is over
            path.append(self.name(this, outer))
            self.mark(path[-1])
            try:
                result = call(this, *given, **named)
                self.own(result, path[-1])
            finally:
                path.pop()
                self.mark(outer)
            return result

        def run_backward(roots: Any, *given: Any, **named: Any) -> Any:
            self.backward_at, self.forwards = stack_here(), 0
            self.own(roots, "")
            return run(roots, *given, **named)

        module.__call__ = called
        torch.autograd._engine_run_backward = run_backward
        hook = sys.excepthook

        def told(kind: Any, error: BaseException, trace: TracebackType | None) -> None:
            before: BaseException | None = error  # and what it was raised from
            while before is not None:
                before.__traceback__ = without_ours(before.__traceback__)
                before = before.__cause__ or before.__context__
            hook(kind, error, without_ours(trace))

        sys.excepthook = told
        if dynamo := sys.modules.get("torch._dynamo.utils"):  # to it ours is torch's own
            dynamo.unpatched_nn_module_call = called  # type: ignore[attr-defined]

    def name(self, module: Any, outer: str) -> str:
        with contextlib.suppress(Exception):  # a module may be scripted, or not to be hashed
            if not outer and not self.is_backward():
                self.see(module)
            return self.names[module]
        return f"{outer}.{type(module).__name__}".lstrip(".")

    def see(self, module: Any) -> None:
        """An outermost one."""
        torch = self.torch
        if module not in self.names:
            self.register(module)
        if next(module.parameters(), None) is not None:
            self.forwards += torch.is_grad_enabled()
            self.is_evaluated |= not (torch.is_grad_enabled() and module.training)

    def register(self, module: Any) -> None:
        """The whole tree under an outermost module, by the class of what its wrappers hold."""
        outside = [module]
        while inner := next((i for w in WRAPPERS if (i := module._modules.get(w))), None):
            outside.append(module := inner)
        root = type(module).__name__.removeprefix("FSDP")  # fully_shard changes classes
        self.names.update(dict.fromkeys(outside, root))
        for name, part in module.named_modules():
            self.names[part] = f"{root}.{name}".replace("._orig_mod", "").rstrip(".")

    def own(self, found: Any, path: str) -> None:
        """The nodes that made these tensors are of `path` when they run backward, but for those
        that a module further in has: the first to say so."""
        with contextlib.suppress(Exception):
            for tensor in tensors(found, self.torch.Tensor):
                node = tensor.grad_fn
                if node is not None and NODE not in node.metadata:
                    node.metadata[NODE] = path
                    node.register_prehook(lambda *_: self.mark(path, is_node=True))

    def is_backward(self) -> bool:
        return bool(self.torch._C._current_graph_task_id() != -1)

    def mark(self, path: str, is_node: bool = False) -> None:
        """Of what this thread asks for from now on."""
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
    """What a traceback is without this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    if trace is not None:
        trace.tb_next = without_ours(trace.tb_next)
    return trace


def tensors(found: Any, kind: type, depth: int = MAX_DEPTH) -> Iterator[Any]:
    if isinstance(found, kind):
        yield found
    elif depth and isinstance(found, list | tuple | dict):
        inner: Iterable[Any] = found.values() if isinstance(found, dict) else found
        for each in inner:
            yield from tensors(each, kind, depth - 1)
