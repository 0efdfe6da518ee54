"""A compiled module on shapes: forward and backward by their kernels, inside the eager step.

It stands in the step where the eager module would: the loss, autocast around it, the gradients'
accumulation, the optimizer and all else stay eager, as they do when only the model is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.memory.profile import walk
from planner.step.autograd import Gradients, Node, begin, finish
from planner.step.compiled.buffers import Kernel, buffer_of, plan
from planner.step.compiled.graph import Graph, Value, is_input
from planner.step.compiled.partition import partition
from planner.step.nn import Module
from planner.step.strides import contiguous_strides
from planner.step.tensor import Device, Parameter, Storage, Tensor

POOL_LABEL = "CUDA graph pool"


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
        next(output for output in graph.outputs if output.shape == tangents[0].shape),
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
    """Runs the kernels of `graph` in place of the code of `module`, whose parameters it has.

    With CUDA graphs (`is_graphed`) all memory of both halves is a pool, taken whole at the first
    call and never given back.
    """

    def __init__(self, module: Module, graph: CompiledGraph, is_graphed: bool = False) -> None:
        self.module = module
        self.graph = graph
        self.is_graphed = is_graphed
        self.leaves = list(module.parameters())
        self.pool: Pool | None = None

    def children(self) -> Iterator[tuple[str, Module]]:
        yield from self.module.children()

    def parameters(self) -> Iterator[Parameter]:
        yield from self.module.parameters()

    def forward(self, images: Tensor) -> Tensor:
        """Without gradients the module itself: that would be another graph, of another batch."""
        if not images.device.grad_enabled:
            logits: Tensor = self.module(images)
            return logits
        return self._replay(images) if self.is_graphed else self._launch(images)

    def _launch(self, images: Tensor) -> Tensor:
        graph = self.graph
        memory: dict[Value, Storage] = {graph.images: images.storage}
        kept = {buffer_of(value) for value in (*graph.saved, graph.output)}
        _run(images.device, graph.forward, memory, kept)
        saved = [_bytes_of(memory[b]) for b in _saved_buffers(graph) if b in memory]
        node = begin("CompiledFunctionBackward", self.leaves, _backward, saved, graph)
        return finish(_tensor(graph.output, memory[buffer_of(graph.output)]), node)

    def _replay(self, images: Tensor) -> Tensor:
        device = images.device
        if self.pool is None:
            self.pool = Pool(device, self.graph)
        _compute(device, self.graph.forward)
        data = (self.graph, self.pool)
        node = begin("CompiledFunctionBackward", self.leaves, _replay_backward, (), data)
        return finish(_tensor(self.graph.output, self.pool.scratch), node)


class Pool:
    """A private pool at its high-water mark, as three storages: what forward saves, the gradients,
    and the rest. Gradients are made while saved tensors die, so these get what is left for them.
    """

    def __init__(self, device: Device, graph: CompiledGraph) -> None:
        size = high_water_bytes(graph)
        gradients = min(size, sum(g.num_bytes for g in graph.gradients if g is not None))
        saved = min(size - gradients, graph.saved_bytes())
        self.saved = Storage(device, saved, f"{POOL_LABEL} (saved)")
        self.saved.assign("activations")
        self.gradients = Storage(device, gradients, f"{POOL_LABEL} (gradients)")
        self.gradients.assign("gradients")
        self.scratch = Storage(device, size - gradients - saved, f"{POOL_LABEL} (rest)")


def high_water_bytes(graph: CompiledGraph) -> int:
    """Most bytes that both halves hold at once, parameters and other static inputs left out.

    Inputs that are not static are copied into the pool before a replay.
    """
    return max(peak_bytes(graph).values())


def peak_bytes(graph: CompiledGraph) -> dict[str, int]:
    """Most bytes alive in "forward" and in "backward", the images and what is saved included."""
    device = Device()
    memory = {graph.images: _allocate(device, graph.images)}
    kept = {buffer_of(value) for value in (*graph.saved, graph.output)}
    _run(device, graph.forward, memory, kept)
    num_forward = len(device.events)
    memory[graph.tangent] = _allocate(device, graph.tangent)
    _run(device, graph.backward, memory, set())
    live = walk(device.events).live
    return {"forward": max(live[:num_forward]), "backward": max(live[num_forward:])}


def _allocate(device: Device, value: Value) -> Storage:
    return Storage(device, value.num_bytes, value.op)


def _tensor(value: Value, storage: Storage) -> Tensor:
    shape = value.shape or ()
    return Tensor(storage, shape, contiguous_strides(shape), value.dtype)


def _replay_backward(node: Node, grads: list[Tensor | None]) -> Gradients:
    """Gradients stay in the pool: a step has one backward (`planner.libraries.limits`)."""
    graph, pool = node.data
    _compute(pool.scratch.device, graph.backward)
    return tuple([None if g is None else _tensor(g, pool.gradients) for g in graph.gradients])


def _compute(device: Device, kernels: Iterable[Kernel]) -> None:
    scope = device.scope
    for kernel in kernels:
        device.scope = kernel.path
        _cost(device, kernel)
    device.scope = scope


def _cost(device: Device, kernel: Kernel) -> None:
    device.compute(kernel.name, kernel.kind, kernel.dtype, kernel.flops, kernel.num_bytes)


def _saved_buffers(graph: CompiledGraph) -> list[Value]:
    return list(dict.fromkeys(buffer_of(value) for value in graph.saved))


def _bytes_of(storage: Storage) -> Tensor:
    """All of a storage, whatever is in it."""
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
        scratch = [Storage(device, num_bytes, kernel.name) for num_bytes in kernel.scratch]
        _cost(device, kernel)
        scratch.clear()
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
    return tuple([None if g is None else _tensor(g, memory[buffer_of(g)]) for g in graph.gradients])
