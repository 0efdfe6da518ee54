"""A step on shapes, watched: which operation made which tensor from which.

The operations of `planner.step` are watched through the interpreter's own hook for profilers, so
the eager step, which is run thousands of times and whose lifetimes are reference counts, carries
nothing of this. What each watched function means in a graph is said in `decompositions`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from planner.ledger import Category, OperationKind
from planner.step.autocast import AutocastScope
from planner.step.compiled.graph import Graph, Value
from planner.step.compiled.passes import simplify
from planner.step.engine import backward
from planner.step.nn import Module, name_modules
from planner.step.strides import Shape
from planner.step.tensor import Device, Tensor, empty

Locals = dict[str, Any]
# What a watched function means: (tracer, its arguments, its locals as it returns, its result).
Rule = Callable[["Tracer", Locals, Locals, Any], None]


_DETACH = Tensor.detach.__code__


class SilentDevice(Device):
    """Writes nothing down: only the graph is of interest. Regions of checkpointing are numbered."""

    def __init__(self, tracer: Tracer, float_dtype: str) -> None:
        super().__init__(in_place_sums=False, float_dtype=float_dtype)
        self.checkpoint_region = tracer.run_region

    def allocate(self, num_bytes: int, label: str) -> int:
        return 0

    def release(self, storage: int) -> None:
        pass

    def tag(self, storage: int, category: Category) -> None:
        pass

    def compute(
        self,
        name: str,
        kind: OperationKind,
        dtype: str,
        flops: int,
        num_bytes: int,
        kernels: int = 1,
    ) -> None:
        pass


class Tracer:
    """The graph so far, and the value of every tensor seen."""

    def __init__(self) -> None:
        self.nodes: list[Value] = []
        self.values: dict[int, Value] = {}
        self.same: dict[int, Tensor] = {}  # detached tensors, and what they were detached from
        self.tensors: list[Tensor] = []  # so that no identity is given twice
        self.gradients: dict[int, Value] = {}
        self.region = 0
        self.num_regions = 0
        self.device: Device | None = None
        self.counts: dict[str, int] = {}
        self._frames: list[tuple[FrameType, Locals, Rule]] = []
        self._opaque: FrameType | None = None

    def add(
        self,
        op: str,
        inputs: tuple[Value, ...],
        shape: Shape | None,
        dtype: str,
        constant: object = None,
        strides: Shape | None = None,
    ) -> Value:
        """A new node."""
        path = self.device.scope if self.device is not None else ""
        node = Value(op, inputs, shape, dtype, constant, strides, self.region, path=path)
        self.nodes.append(node)
        return node

    def count(self, name: str) -> int:
        """0, 1, 2 … at each call with that name."""
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        return number

    def value(self, tensor: Tensor) -> Value:
        """What made `tensor`; an input or a constant where nothing watched did."""
        while id(tensor) in self.same:
            tensor = self.same[id(tensor)]
        known = self.values.get(id(tensor))
        if known is None:
            category = tensor.storage.category
            if category in ("parameters", "buffers"):
                known = self._primal(tensor, is_static=True)
            else:
                known = self.add("full", (), tensor.shape, tensor.dtype, ("made", len(self.nodes)))
            self.bind(tensor, known)
        return known

    def _primal(self, tensor: Tensor, is_static: bool) -> Value:
        node = Value("primal", (), tensor.shape, tensor.dtype, is_static=is_static)
        self.nodes.append(node)
        return node

    def bind(self, tensor: Tensor, value: Value) -> None:
        """From now on `tensor` is `value`."""
        self.values[id(tensor)] = value
        self.tensors.append(tensor)

    def take(self, *arguments: Tensor | None) -> None:
        """Makes parameters among `arguments` inputs, in this order."""
        for argument in arguments:
            if argument is not None:
                self.value(argument)

    def run_region(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A checkpointed call: what it computes is to be recomputed. The innermost region counts;
        a new number for each, later ones larger."""
        outer = self.region
        self.num_regions += 1
        self.region = self.num_regions
        try:
            return function(*args)
        finally:
            self.region = outer

    def watch(self, frame: FrameType, event: str, result: Any) -> None:
        """The profile hook. A tensor may be detached before it is known what made it."""
        if frame.f_code is _DETACH:
            if event == "return":
                self.same[id(result)] = frame.f_locals["self"]
                self.tensors += (result, frame.f_locals["self"])
        elif event == "call":
            found = _rules().get(frame.f_code)
            if found is not None and self._opaque is None:
                rule, is_opaque = found
                early = dict(frame.f_locals)
                self._frames.append((frame, early, rule))
                if is_opaque:
                    self._opaque = frame
        elif event == "return" and self._frames and self._frames[-1][0] is frame:
            _, early, rule = self._frames.pop()
            if self._opaque is frame:
                self._opaque = None
            if result is not None:
                rule(self, early, frame.f_locals, result)


def _rules() -> dict[CodeType, tuple[Rule, bool]]:
    from planner.step.compiled.decompositions import RULES

    return RULES


def record_graph(
    build: Callable[[Device], Module],
    images: tuple[Shape, str],
    autocast_dtype: str | None,
    float_dtype: str,
) -> tuple[Graph, list[Value | None]]:
    """The joint graph of the module that `build` makes: images of a shape and dtype to logits, and
    back; and the primal of each parameter in the module's order (None: the graph has no use of it).
    """
    tracer = Tracer()
    device = SilentDevice(tracer, float_dtype)
    tracer.device = device
    module = build(device)
    name_modules(module)
    parameters = list(module.parameters())
    x = empty(device, *images, "images")
    tracer.bind(x, tracer._primal(x, is_static=False))
    profiler = sys.getprofile()
    sys.setprofile(tracer.watch)
    try:
        with AutocastScope(device, autocast_dtype):
            logits: Tensor = module(x)
        output = tracer.value(logits)
        gradient = empty(device, logits.shape, logits.dtype, "tangent")
        tangent = Value("tangent", (), logits.shape, logits.dtype)
        tracer.nodes.append(tangent)
        tracer.bind(gradient, tangent)
        backward(logits, gradient)
    finally:
        sys.setprofile(profiler)
    primals = [tracer.values.get(id(p)) for p in parameters]
    cells = {id(p.cell): v for p, v in zip(parameters, primals, strict=True)}
    gradients = {cells[cell]: value for cell, value in tracer.gradients.items()}
    inputs = [n for n in tracer.nodes if n.op == "primal"]
    graph = Graph(
        [*inputs, tangent, *(n for n in tracer.nodes if n.op not in ("primal", "tangent"))],
        [output],
        [gradients.get(n) for n in inputs],
    )
    return simplify(graph), primals
