"""The two halves of a compiled graph, forward and backward: operations by their aten names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

PRIMAL, TANGENT = "primal", "tangent"  # an input of forward; what the backward begins with


@dataclass(eq=False)
class Value:
    """One node of a half: an input, or an operation on other nodes.

    `op` is the operation's aten name without overload ("mul", "view", "getitem",
    "convert_element_type"), or `PRIMAL` or `TANGENT` of an input. `shape` is None where the node is
    a tuple; then its parts are `getitem` nodes. `path` is the module that the operation is from.
    """

    op: str
    name: str
    inputs: tuple[Value, ...]
    shape: tuple[int, ...] | None
    strides: tuple[int, ...]
    dtype: str
    num_bytes: int
    numel: int
    path: str
    users: list[Value]  # of what forward saved, those in backward too

    @property
    def is_input(self) -> bool:
        return self.op in (PRIMAL, TANGENT)

    def __repr__(self) -> str:
        return f"%{self.name} {self.op}{list(self.shape or ())} {self.dtype}"


@dataclass(frozen=True)
class Half:
    """Nodes in the order in which they are computed, inputs first; `results` in torch's order."""

    nodes: tuple[Value, ...]
    results: tuple[Value | None, ...]

    def inputs(self, op: str) -> list[Value]:
        return [node for node in self.nodes if node.op == op]


def read_half(graph: fx.Graph, known: dict[str, Value]) -> Half:
    """A half of torch's partition. Its inputs that bear the name of a value in `known` (what
    forward saved) are that value; all its other values are added there."""
    here: dict[fx.Node, Value] = {}
    results: tuple[Value | None, ...] = ()
    for node in graph.nodes:
        if node.op == "output":
            results = tuple([here.get(r) if isinstance(r, fx.Node) else None for r in node.args[0]])
        elif node.op == "placeholder" and node.name in known:
            here[node] = known[node.name]
        else:
            here[node] = _value(node, here)
    values = tuple(here.values())
    for value in values:
        if value.name in known:
            continue  # it has its inputs in the other half
        for source in dict.fromkeys(value.inputs):
            source.users.append(value)
    known.update((value.name, value) for value in values)
    return Half(values, results)


def _value(node: fx.Node, here: dict[fx.Node, Value]) -> Value:
    inputs = tuple([here[source] for source in _arguments(node)])
    operation, path, meta = _operation(node), _path(node), node.meta.get("val")
    if not isinstance(meta, Tensor) or _is_host_state(node):
        return Value(operation, node.name, inputs, None, (), "float32", 0, 0, path, [])
    numel = meta.numel()
    return Value(
        operation,
        node.name,
        inputs,
        tuple(meta.shape),
        tuple(meta.stride()),
        str(meta.dtype).removeprefix("torch."),
        numel * meta.element_size(),
        numel,
        path,
        [],
    )


def _is_host_state(node: fx.Node) -> bool:
    """The random generator's state that checkpointing keeps: on CUDA too it lies on the host.

    In a forward it is what an operation saves beside its result, in a backward an input, whose size
    may be a symbol.
    """
    if node.op == "placeholder":
        readers = [user for user in node.users if "run_with_rng_state" in str(user.target)]
        return any(user.args[0] is node for user in readers)
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node) or "save_rng_state" not in str(source.target):
        return False
    return bool(node.args[1] == 0)


def _operation(node: fx.Node) -> str:
    if node.op == "placeholder":
        return TANGENT if "tangents" in str(node.target) else PRIMAL
    return _name(node.target)


def _name(operator: Any) -> str:
    packet = getattr(operator, "overloadpacket", operator)
    return str(getattr(packet, "__name__", packet)).rpartition(".")[2]


def _arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Repeated where they are."""
    leaves = torch.utils._pytree.arg_tree_leaves(*node.args, **node.kwargs)
    return (leaf for leaf in leaves if isinstance(leaf, fx.Node))


def _path(node: fx.Node) -> str:
    """`L['self'].layers.0.blocks.1.mlp.fc1` is `layers.0.blocks.1.mlp.fc1`; of the backward too."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    where = str([*stack.values()][-1][0]) if stack else ""
    return where.partition("].")[2]


@cache
def view_operators() -> frozenset[str]:
    """torch's own list of what shares the memory of its input, by aten name."""
    from torch._functorch.partitioners import get_default_op_list

    return frozenset(_name(operator) for operator in get_default_op_list().view_ops)


@cache
def recomputable_operators() -> frozenset[str]:
    """torch's own list of what the partitioner may compute again, views among them."""
    from torch._functorch.partitioners import get_default_op_list

    return frozenset(_name(operator) for operator in get_default_op_list().recomputable_ops)
