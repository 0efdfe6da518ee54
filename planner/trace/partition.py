"""What `torch.compile` would do with a real module on CUDA, up to the partition of its graph.

Dynamo, AOTAutograd, Inductor's passes over the joint graph and the min-cut partitioner run for
real, on CPU tensors under CUDA's rules (`cuda_rules`); nothing is compiled. Needs torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from planner.errors import UnsupportedError
from planner.libraries.building import Build
from planner.schema import Model, TrainSetting
from planner.step.compiled.graph import Graph, Value
from planner.trace.building import build_task
from planner.trace.cuda_rules import as_on_cuda


@dataclass(frozen=True)
class TorchPartition:
    """The joint graph of a compiled module, and its two halves.

    `num_outputs` are the model's own outputs, first among those of `forward`; the others are saved
    for backward: inputs (parameters, images) as they are, and intermediates.
    """

    joint: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule
    num_outputs: int
    static_inputs: frozenset[int]
    num_parameters: int = 0

    def graph(self) -> Graph:
        """The joint graph as the step on shapes has it."""
        return _graph(self)

    def saved(self) -> list[fx.Node]:
        """The intermediates that forward keeps for backward, in order."""
        (output,) = self.forward.graph.find_nodes(op="output")
        nodes = output.args[0][self.num_outputs :]
        return [n for n in nodes if isinstance(n, fx.Node) and not _is_input(n)]

    def saved_bytes(self) -> int:
        """Their bytes; two views of one storage count twice, as the partitioner counts them."""
        values = (node.meta["val"] for node in self.saved())
        return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def _is_input(node: fx.Node) -> bool:
    """A parameter, the images; or the CPU's random state, which on CUDA is no tensor."""
    if node.op == "placeholder":
        return True
    source = node.args[0] if node.op == "call_function" and node.args else None
    return isinstance(source, fx.Node) and "rng_state" in str(source.target)


class _Captured(BaseException):  # no Exception: nothing on the way may take it for a failure
    """The partition is known; there is nothing to compile."""


def partition_compiled(build: Build, model: Model, setting: TrainSetting) -> TorchPartition:
    """Compiles the module that `build` makes as far as its partition, at the setting's batch.

    Raises UnsupportedError where Dynamo finds more than one graph.
    """
    task, module, _ = build_task(build, model, setting)
    batch = task.batch(setting.batch_size, torch.device("cpu"))
    found: list[TorchPartition] = []
    torch._dynamo.reset()
    with as_on_cuda():
        compiled = torch.compile(module, backend=_backend(found), dynamic=False, fullgraph=True)
        with contextlib.suppress(_Captured), _autocast(setting):
            task.loss(compiled, batch)
    torch._dynamo.reset()
    if not found:
        raise UnsupportedError(
            f"{model.title} has no graph that needs a backward.", "Estimate it uncompiled."
        )
    return replace(found[0], num_parameters=sum(p.numel() for p in module.parameters()))


def _backend(found: list[TorchPartition]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            forward, backward = partition_fn(joint, inputs, **kwargs)
        static = frozenset(kwargs.get("static_lifetime_input_indices") or ())
        found.append(TorchPartition(joint, forward, backward, kwargs["num_fwd_outputs"], static))
        raise _Captured

    def never(*_: Any) -> Any:
        raise AssertionError("the graph has no backward")

    return aot_autograd(
        fw_compiler=never, partition_fn=partition, decompositions=select_decomp_table()
    )


@contextlib.contextmanager
def _autocast(setting: TrainSetting) -> Iterator[None]:
    name = setting.autocast_dtype
    if name is None:
        yield
        return
    with torch.autocast("cpu", dtype=getattr(torch, name)):
        yield


def _graph(partition: TorchPartition) -> Graph:
    graph = Graph()
    values: dict[fx.Node, Value] = {}
    num_primals = 0
    for node in partition.joint.graph.nodes:
        if node.op == "output":
            results = [values.get(r) if isinstance(r, fx.Node) else None for r in node.args[0]]
            graph.outputs = [r for r in results[: partition.num_outputs] if r is not None]
            graph.gradients = results[partition.num_outputs :]
            continue
        op = _name(node)
        value = Value(
            op,
            tuple(values[source] for source in _arguments(node)),
            *_shape(node.meta.get("val")),
            region=_region(node),
            is_static=op == "primal" and num_primals in partition.static_inputs,
        )
        num_primals += op == "primal"
        values[node] = value
        graph.nodes.append(value)
    return graph.finished()


def _name(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "tangent" if "tangents" in str(node.target) else "primal"
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def _arguments(node: fx.Node) -> list[fx.Node]:
    """Repeated where they are."""
    leaves = torch.utils._pytree.arg_tree_leaves(*node.args, **node.kwargs)
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def _shape(value: object) -> tuple[tuple[int, ...] | None, str]:
    if not isinstance(value, torch.Tensor):
        return None, "float32"
    return tuple(value.shape), str(value.dtype).removeprefix("torch.")


def _region(node: fx.Node) -> int:
    """Also of what the partitioner has meanwhile marked to be saved, at a region's boundary."""
    from torch.utils.checkpoint import CheckpointPolicy

    marks = (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
        CheckpointPolicy.MUST_SAVE,
    )
    if node.meta.get("recompute") not in marks or "ac_graph_id" not in node.meta:
        return 0
    return int(node.meta["ac_graph_id"]) + 1
