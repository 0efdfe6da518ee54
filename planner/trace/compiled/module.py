"""A compiled module in the step that is traced: its kernels in place of its code.

Only the forward and backward of the model, or of its blocks, are compiled. The loss, autocast
around it, the gradients' accumulation, the optimizer and all else are those of the traced step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode_temporarily
from torch.utils._pytree import tree_flatten, tree_unflatten

from planner.core.errors import UnsupportedError
from planner.ledger.ledger import Computed
from planner.trace.compiled.buffers import Kernel, buffer_of, plan
from planner.trace.compiled.graph import PRIMAL, TANGENT, Value, read_half
from planner.trace.compiled.partition import Partition
from planner.trace.recorder import Recorder
from planner.trace.trees import tensors_in

Memory = dict[Value, Tensor]  # each buffer's storage as bytes; an input's is the tensor itself
# The graph of a call with these arguments; None where it has none.
Graphs = Callable[[tuple[Any, ...], Mapping[str, Any]], "CompiledGraph | None"]


@dataclass(frozen=True)
class CompiledGraph:
    """Both halves as kernels. `outputs` are forward's results; `trained` says which inputs get a
    gradient, and `gradients` are theirs. `arguments` are the inputs that the caller gives, by their
    number among the tensors of the call."""

    outputs: tuple[Value, ...]
    tangents: tuple[Value, ...]
    trained: tuple[str | int, ...]
    gradients: tuple[Value, ...]
    saved: tuple[Value, ...]
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    arguments: Mapping[Value, int]

    @cached_property
    def saved_buffers(self) -> tuple[Value, ...]:
        """What forward leaves for backward on the device, each buffer once, parameters left out."""
        buffers = dict.fromkeys(buffer_of(value) for value in self.saved)
        on_device = [buffer for buffer in buffers if buffer.shape is not None]
        return tuple([b for b in on_device if not b.is_input or b in self.arguments])

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
    pairs = zip(partition.sources, backward.results, strict=True)
    gradients = {source: g for source, g in pairs if source is not None and g is not None}
    inputs = zip(forward.inputs(PRIMAL), partition.sources, strict=False)
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
        {value: source for value, source in inputs if isinstance(source, int)},
    )


def run_compiled(module: nn.Module, graphs: Graphs, path: str = "") -> None:
    """From here on `module`, which is called `path` in the model, runs the kernels of the graph
    that was compiled for its like and for what it is called with."""
    module.forward = _Forward(module, graphs, path)


class _Forward:
    """The `forward` of a compiled module. Without gradients it is the module's own: that would be
    another graph, of another batch."""

    def __init__(self, module: nn.Module, graphs: Graphs, path: str) -> None:
        self.module = weakref.ref(module)  # which has this one: a cycle would outlive the trace
        self.code = type(module).forward
        self.graphs = graphs
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        graph = self.graphs(args, kwargs) if torch.is_grad_enabled() else None
        if graph is None:
            return self.code(module, *args, **kwargs)
        given = tensors_in((args, kwargs))
        parameters = dict(module.named_parameters())
        trained = [given[s] if isinstance(s, int) else parameters[s] for s in graph.trained]
        call = _Call(graph, _recorder(), self.path)
        call.memory = {value: given[number] for value, number in graph.arguments.items()}
        apply: Any = _Function.apply  # typed from torch 2.15 on
        results: tuple[Tensor, ...] = apply(call, *trained)
        with _pop_mode_temporarily(), torch.no_grad():
            returned = self.code(module, *args, **kwargs)
        return _in_the_form_of(returned, results)


def _in_the_form_of(returned: Any, results: Sequence[Tensor]) -> Any:
    """`results` in the structure that the module's own code returned, matched by shape and dtype: a
    graph may return its buffers' updates too.

    Where a dtype differs, as of what is interpolated under autocast, which torch decomposes and
    leaves in 16 bits (2.14 on an emulated A100), the module's own are the last, in its order."""
    leaves, structure = tree_flatten(returned)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    last = results[len(results) - len(tensors) :]
    left = dict(enumerate(results))
    found = []
    for leaf in tensors:
        like = (leaf.shape, leaf.dtype)
        index = next((i for i, r in left.items() if (r.shape, r.dtype) == like), None)
        if index is not None:
            found.append(left.pop(index))
        elif [r.shape for r in last] == [t.shape for t in tensors]:
            found = list(last)
            break
        else:
            raise UnsupportedError(
                f"the module returns a tensor of shape {list(leaf.shape)} that its compiled graph "
                "does not.",
                "Estimate it with --compile off, or measure with 'planner tune'.",
            )
    filled = iter(found)
    whole = [next(filled) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tree_unflatten(whole, structure)


def _recorder() -> Recorder:
    """The one of the trace that runs."""
    (recorder,) = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, Recorder)]
    return recorder


class _Function(torch.autograd.Function):
    """`CompiledFunction` of AOTAutograd: one node for the whole module. What it saves goes through
    autograd, since checkpointing outside of the graph takes it away and makes it again."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *trained: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        results, saved = call.forward()
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*call.without_gradient(results))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        call.memory = dict(zip(call.graph.saved_buffers, ctx.saved_tensors, strict=True))
        ctx.maybe_clear_saved_tensors()
        return (None, *call.backward(grads))


class _Call:
    """One call of the compiled module. `memory` is what it begins a half with: the arguments that
    the caller gives, and then what forward saved."""

    def __init__(self, graph: CompiledGraph, recorder: Recorder, path: str) -> None:
        self.graph = graph
        self.recorder = recorder
        self.path = path
        self.memory: Memory = {}

    def forward(self) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The results, and what is kept for backward."""
        memory, self.memory = self.memory, {}
        kept = {buffer_of(value) for value in (*self.graph.saved, *self.graph.outputs)}
        self._run(self.graph.forward, memory, kept)
        saved = [memory[buffer] for buffer in self.graph.saved_buffers]
        with _pop_mode_temporarily():
            return tuple([_tensor(v, memory[buffer_of(v)]) for v in self.graph.outputs]), saved

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

    def backward(self, grads: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """What forward saved dies with the last kernel that reads it."""
        memory, self.memory = self.memory, {}
        left = [grad for grad in grads if grad is not None]
        for tangent in reversed(self.graph.tangents):
            found = next((g for g in reversed(left) if tuple(g.shape) == tangent.shape), None)
            if found is not None:
                memory[tangent] = found
        del left
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
                    self._path(kernel),
                )
            )  # fmt: skip
            scratch.clear()
            for value in (*kernel.frees, *kernel.overwrites.values()):
                if value not in kept:
                    memory.pop(value, None)

    def _path(self, kernel: Kernel) -> str:
        return ".".join(name for name in (self.path, kernel.path) if name)

    def _take(self, num_bytes: int, kernel: Kernel) -> Tensor:
        with _pop_mode_temporarily():
            taken = torch.empty(num_bytes, dtype=torch.uint8)
        self.recorder.add(taken, kernel.name, self._path(kernel))
        return taken


def _tensor(value: Value, storage: Tensor) -> Tensor:
    if buffer_of(value).is_input:
        return storage.as_strided(value.shape or (), value.strides)
    dtype = getattr(torch, value.dtype)
    return storage.view(dtype).as_strided(value.shape or (), value.strides)
