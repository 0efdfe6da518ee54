"""A compiled module in the step that is traced: its kernels in place of its code.

Only the model's own forward and backward are compiled. The loss, autocast around it, the
gradients' accumulation, the optimizer and all else are those of the traced step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode_temporarily
from torch.utils._pytree import tree_flatten, tree_unflatten

from planner.errors import UnsupportedError
from planner.ledger import Computed
from planner.libraries.building import Build
from planner.schema import Model, TrainSetting
from planner.trace.compiled.buffers import Kernel, buffer_of, plan
from planner.trace.compiled.graph import PRIMAL, TANGENT, Value, read_half
from planner.trace.compiled.partition import Partition, partition_compiled
from planner.trace.recorder import Recorder

Memory = dict[Value, Tensor]  # each buffer's storage, as bytes


@dataclass(frozen=True)
class CompiledGraph:
    """Both halves as kernels. `outputs` are forward's results; `trained` names the parameters that
    want a gradient, and `gradients` are theirs."""

    outputs: tuple[Value, ...]
    tangents: tuple[Value, ...]
    trained: tuple[str, ...]
    gradients: tuple[Value, ...]
    saved: tuple[Value, ...]
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]

    @cached_property
    def saved_buffers(self) -> tuple[Value, ...]:
        """What forward leaves for backward, each buffer once, inputs left out."""
        buffers = dict.fromkeys(buffer_of(value) for value in self.saved)
        return tuple([buffer for buffer in buffers if not buffer.is_input])

    @property
    def saved_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self.saved_buffers)


def plan_kernels(partition: Partition) -> CompiledGraph:
    """The kernels of both halves of torch's partition."""
    known: dict[str, Value] = {}
    forward = read_half(partition.forward, known)
    backward = read_half(partition.backward, known)
    outputs = [v for v in forward.results[: partition.num_outputs] if v is not None]
    saved = [v for v in forward.results[partition.num_outputs :] if v is not None]
    pairs = zip(partition.parameters, backward.results, strict=True)
    gradients = {name: g for name, g in pairs if name is not None and g is not None}
    return CompiledGraph(
        tuple(outputs),
        tuple(backward.inputs(TANGENT)),
        tuple(gradients),
        tuple(gradients.values()),
        tuple(saved),
        tuple(plan(forward.nodes, forward.inputs(PRIMAL), [*outputs, *saved])),
        tuple(
            plan(
                backward.nodes,
                [*saved, *backward.inputs(PRIMAL), *backward.inputs(TANGENT)],
                gradients.values(),
            )
        ),
    )


def compile_graph(build: Build, model: Model, setting: TrainSetting) -> CompiledGraph:
    """The kernels of the module of what `build` makes, at the setting's batch.

    Raises PlannerError where the module does not compile as one graph.
    """
    return plan_kernels(partition_compiled(build, model, setting))


def run_compiled(module: nn.Module, graph: CompiledGraph) -> None:
    """From here on `module` runs the kernels of `graph`, which was compiled of its like."""
    module.forward = _Forward(module, graph)


class _Forward:
    """The `forward` of a compiled module. Without gradients it is the module's own: that would be
    another graph, of another batch."""

    def __init__(self, module: nn.Module, graph: CompiledGraph) -> None:
        self.module = weakref.ref(module)  # which has this one: a cycle would outlive the trace
        self.code = type(module).forward
        self.graph = graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        if not torch.is_grad_enabled():
            return self.code(module, *args, **kwargs)
        parameters = dict(module.named_parameters())
        trained = [parameters[name] for name in self.graph.trained]
        call = _Call(self.graph, _recorder())
        results: tuple[Tensor, ...] = _Function.apply(call, *trained)  # type: ignore[no-untyped-call]
        with _pop_mode_temporarily(), torch.no_grad():
            returned = self.code(module, *args, **kwargs)
        return _in_the_form_of(returned, results)


def _in_the_form_of(returned: Any, results: Sequence[Tensor]) -> Any:
    """`results` in the structure that the module's own code returned, matched by shape and dtype:
    a graph may return its buffers' updates too."""
    leaves, structure = tree_flatten(returned)
    left = dict(enumerate(results))
    found = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            like = (leaf.shape, leaf.dtype)
            index = next((i for i, r in left.items() if (r.shape, r.dtype) == like), None)
            if index is None:
                raise UnsupportedError(
                    f"the module returns a tensor of shape {list(leaf.shape)} that its compiled "
                    "graph does not.",
                    "Estimate it with --compile off, or measure with 'planner tune'.",
                )
            leaf = left.pop(index)
        found.append(leaf)
    return tree_unflatten(found, structure)


def _recorder() -> Recorder:
    """The one of the trace that runs."""
    (recorder,) = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, Recorder)]
    return recorder


class _Function(torch.autograd.Function):
    """`CompiledFunction` of AOTAutograd: one node for the whole module."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *trained: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        results = call.forward()
        ctx.mark_non_differentiable(*call.without_gradient(results))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.call.backward())


class _Call:
    """One call of the compiled module: what its forward saved until its backward has run."""

    def __init__(self, graph: CompiledGraph, recorder: Recorder) -> None:
        self.graph = graph
        self.recorder = recorder
        self.saved: Memory = {}

    def forward(self) -> tuple[Tensor, ...]:
        memory: Memory = {}
        kept = {buffer_of(value) for value in (*self.graph.saved, *self.graph.outputs)}
        self._run(self.graph.forward, memory, kept)
        self.saved = {b: memory[b] for b in self.graph.saved_buffers if b in memory}
        with _pop_mode_temporarily():
            return tuple([_tensor(v, memory[buffer_of(v)]) for v in self.graph.outputs])

    def without_gradient(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Of forward's results, those that no tangent stands for."""
        tangents = [tangent.shape for tangent in self.graph.tangents]
        found = []
        for result in reversed(results):  # the module's own come last
            if tuple(result.shape) in tangents:
                tangents.remove(tuple(result.shape))
            else:
                found.append(result)
        return found

    def backward(self) -> tuple[Tensor, ...]:
        """What forward saved dies with the last kernel that reads it."""
        memory, self.saved = self.saved, {}
        self._run(self.graph.backward, memory, {buffer_of(g) for g in self.graph.gradients})
        with _pop_mode_temporarily():
            return tuple([_tensor(g, memory[buffer_of(g)]) for g in self.graph.gradients])

    def _run(self, kernels: Iterable[Kernel], memory: Memory, kept: set[Value]) -> None:
        """Allocates what each kernel writes and drops what is dead after it."""
        for kernel in kernels:
            for value in kernel.writes:
                dying = kernel.overwrites.get(value)
                if dying in memory and dying not in kept:
                    memory[value] = memory.pop(dying)
                else:
                    memory[value] = self._take(value.num_bytes, kernel)
            scratch = [self._take(num_bytes, kernel) for num_bytes in kernel.scratch]
            self.recorder.events.append(
                Computed(
                    kernel.name, kernel.kind, kernel.dtype, kernel.flops, kernel.num_bytes, 1,
                    kernel.path,
                )
            )  # fmt: skip
            scratch.clear()
            for value in (*kernel.frees, *kernel.overwrites.values()):
                if value not in kept:
                    memory.pop(value, None)

    def _take(self, num_bytes: int, kernel: Kernel) -> Tensor:
        with _pop_mode_temporarily():
            taken = torch.empty(num_bytes, dtype=torch.uint8)
        self.recorder.add(taken, kernel.name, kernel.path)
        return taken


def _tensor(value: Value, storage: Tensor) -> Tensor:
    dtype = getattr(torch, value.dtype)
    return storage.view(dtype).as_strided(value.shape or (), value.strides)
