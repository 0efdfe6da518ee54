"""A compiled module on shapes: forward and backward by their kernels, inside the eager step.

It stands in the step where the eager module would: the loss, autocast around it, the gradients'
accumulation, the optimizer and all else stay eager, as they do when only the model is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.step.autograd import Gradients, Node, begin, finish
from planner.step.compiled.buffers import Kernel, buffer_of, plan
from planner.step.compiled.graph import Graph, Value, is_input
from planner.step.compiled.partition import partition
from planner.step.nn import Module
from planner.step.strides import contiguous_strides
from planner.step.tensor import Device, Parameter, Storage, Tensor

POOL_LABEL = "cuda graph pool"


@dataclass(frozen=True)
class CompiledGraph:
    """Both halves of a joint graph as kernels. `images` is the input that is no parameter;
    `primals` and `gradients` belong to the module's parameters, None where the graph has none."""

    output: Value
    images: Value
    tangent: Value
    primals: tuple[Value | None, ...]
    gradients: tuple[Value | None, ...]
    saved: tuple[Value, ...]
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]

    def saved_bytes(self) -> int:
        """Of the buffers that forward leaves for backward, each counted once."""
        buffers = {buffer_of(value) for value in self.saved}
        return sum(buffer.num_bytes for buffer in buffers if not is_input(buffer))


def compile_graph(graph: Graph, primals: Sequence[Value | None]) -> CompiledGraph:
    """Partitions a joint graph and plans its kernels."""
    parts = partition(graph)
    gradient_of = dict(zip(graph.primals(), graph.gradients, strict=True))
    gradients = tuple(None if p is None else gradient_of[p] for p in primals)
    tangents = [n for n in graph.nodes if n.op == "tangent"]
    inputs = graph.primals()
    return CompiledGraph(
        graph.outputs[0],
        next(n for n in inputs if not n.is_static),
        tangents[0],
        tuple(primals),
        gradients,
        parts.saved,
        tuple(plan(parts.forward_nodes(), inputs, [*graph.outputs, *parts.saved])),
        tuple(
            plan(
                parts.backward_nodes(),
                [*parts.saved, *inputs, *tangents],
                [g for g in gradients if g is not None],
            )
        ),
    )


class CompiledModule(Module):
    """Runs the kernels of `graph` in place of the code of `module`, whose parameters it has."""

    def __init__(self, module: Module, graph: CompiledGraph) -> None:
        self.module = module
        self.graph = graph
        self.leaves = list(module.parameters())

    def children(self) -> Iterator[tuple[str, Module]]:
        yield from self.module.children()

    def parameters(self) -> Iterator[Parameter]:
        yield from self.module.parameters()

    def forward(self, images: Tensor) -> Tensor:
        graph = self.graph
        device = images.device
        memory: dict[Value, Storage] = {graph.images: images.storage}
        kept = {buffer_of(value) for value in (*graph.saved, graph.output)}
        _run(device, graph.forward, memory, kept)
        saved = [memory[b] for b in _saved_buffers(graph) if b in memory]
        node = begin(
            "CompiledFunctionBackward", self.leaves, _backward,
            [_view(storage) for storage in saved], graph,
        )  # fmt: skip
        output = graph.output
        shape = output.shape or ()
        y = Tensor(memory[buffer_of(output)], shape, contiguous_strides(shape), output.dtype)
        return finish(y, node)


def _saved_buffers(graph: CompiledGraph) -> list[Value]:
    return list(dict.fromkeys(buffer_of(value) for value in graph.saved))


def _view(storage: Storage) -> Tensor:
    return Tensor(storage, (storage.num_bytes,), (1,), "uint8")


def _run(
    device: Device, kernels: Iterable[Kernel], memory: dict[Value, Storage], kept: set[Value]
) -> None:
    """Allocates what each kernel writes and drops what is dead after it."""
    scope = device.scope
    for kernel in kernels:
        device.scope = kernel.path
        for value in kernel.writes:
            dying = kernel.overwrites.get(value)
            if dying in memory and dying not in kept:
                memory[value] = memory.pop(dying)
            else:
                memory[value] = Storage(device, value.num_bytes, kernel.name)
        if kernel.kind in ("pointwise", "reduction") or kernel.flops or kernel.num_bytes:
            device.compute(kernel.name, kernel.kind, kernel.dtype, kernel.flops, kernel.num_bytes)
        for value in kernel.frees:
            if value not in kept:
                memory.pop(value, None)
        for value in kernel.overwrites.values():
            if value not in kept:
                memory.pop(value, None)
    device.scope = scope


def _backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """What forward saved dies with the last kernel that reads it (`maybe_clear_saved_tensors`)."""
    graph: CompiledGraph = node.data
    tangent = grads[0]
    assert tangent is not None
    device = tangent.device
    memory = {graph.tangent: tangent.storage}
    grads[0] = tangent = None
    buffers = [b for b in _saved_buffers(graph) if not is_input(b) or b is graph.images]
    for value, saved in zip(buffers, node.saved, strict=True):
        memory[value] = saved.unpack().storage
        memory[value].hold()  # it stays an activation until it dies
    node.release()
    _run(device, graph.backward, memory, set())
    return tuple([_gradient(value, memory) for value in graph.gradients])


def _gradient(value: Value | None, memory: dict[Value, Storage]) -> Tensor | None:
    if value is None:
        return None
    shape = value.shape or ()
    return Tensor(memory[buffer_of(value)], shape, contiguous_strides(shape), value.dtype)


def compiled_builder(
    build: Callable[[Device], Module], graph: CompiledGraph, pool: bool
) -> Callable[[Device], Module]:
    """Builds the module and stands the compiled one in its place."""

    def build_compiled(device: Device) -> Module:
        return CompiledModule(build(device), graph)

    return build_compiled
