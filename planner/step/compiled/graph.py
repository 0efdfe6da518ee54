"""The joint graph of forward and backward: operations by their aten names, with shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from planner.step.strides import Shape
from planner.step.tensor import DTYPE_BYTES


class Value:
    """One node of the graph: an input, or an operation on other nodes.

    `op` is the operation's aten name without overload ("mul", "view", "getitem",
    "convert_element_type"), "primal" for an input of forward, "tangent" for one of backward.
    `shape` is None where the node is a tuple; then its parts are `getitem` nodes. `constant` is
    what else distinguishes it from an equal operation on the same inputs. `region` numbers the
    checkpointed region that it is to be recomputed in, 0 for none.
    `is_static` says that a primal outlives the step (a parameter or buffer).
    """

    __slots__ = (
        "constant", "dtype", "index", "inputs", "is_static", "num_bytes", "op", "path", "region",
        "shape", "strides", "users",
    )  # fmt: skip

    def __init__(
        self,
        op: str,
        inputs: tuple[Value, ...],
        shape: Shape | None,
        dtype: str,
        constant: object = None,
        strides: Shape | None = None,
        region: int = 0,
        is_static: bool = False,
        path: str = "",
    ) -> None:
        self.index = -1
        self.op = op
        self.inputs = inputs
        self.shape = shape
        self.dtype = dtype
        self.constant = constant
        self.strides = strides
        self.region = region
        self.is_static = is_static
        self.path = path
        self.num_bytes = 0 if shape is None else prod(shape) * DTYPE_BYTES[dtype]
        self.users: list[Value] = []

    @property
    def numel(self) -> int:
        return 0 if self.shape is None else prod(self.shape)

    def __repr__(self) -> str:
        return f"%{self.index} {self.op}{list(self.shape or ())} {self.dtype}"


@dataclass
class Graph:
    """Nodes in the order they were traced: forward, then backward.

    `outputs` are the results of forward; `gradients` those of backward, one for each primal in
    order, None where it wants none.
    """

    nodes: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    gradients: list[Value | None] = field(default_factory=list)

    def results(self) -> Iterator[Value]:
        yield from self.outputs
        for gradient in self.gradients:
            if gradient is not None:
                yield gradient

    def finished(self) -> Graph:
        """Without what nothing needs; nodes numbered, and each told its users."""
        needed: set[Value] = set()
        stack = list(self.results())
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack.extend(node.inputs)
        self.nodes = [n for n in self.nodes if n in needed or (not n.inputs and is_input(n))]
        link(self.nodes)
        return self

    def primals(self) -> list[Value]:
        return [n for n in self.nodes if n.op == "primal"]


def is_input(node: Value) -> bool:
    return node.op in ("primal", "tangent")


def link(nodes: Iterable[Value]) -> None:
    """Numbers the nodes and tells each its users, in order and without repetition."""
    nodes = list(nodes)
    for index, node in enumerate(nodes):
        node.index = index
        node.users = []
    for node in nodes:
        for source in dict.fromkeys(node.inputs):
            source.users.append(node)


def between(
    first: Graph, second: Graph, steps: int, marked: Sequence[Value | None]
) -> tuple[Graph, list[Value | None]]:
    """`first` with every size moved `steps` times by what `second` differs from it, and the nodes
    there that `marked` are in `first`. AssertionError where the two are not alike."""
    assert len(first.nodes) == len(second.nodes), "a graph depends on the batch"
    made: dict[Value, Value] = {}
    for a, b in zip(first.nodes, second.nodes, strict=True):
        assert a.op == b.op, "a graph depends on the batch"
        shape = a.shape
        if shape is not None and shape != b.shape:
            assert b.shape is not None
            shape = tuple([x + steps * (y - x) for x, y in zip(shape, b.shape, strict=True)])
        inputs = tuple([made[source] for source in a.inputs])
        made[a] = Value(
            a.op, inputs, shape, a.dtype, a.constant, None, a.region, a.is_static, a.path
        )
    graph = Graph(
        list(made.values()),
        [made[node] for node in first.outputs],
        [None if g is None else made[g] for g in first.gradients],
    )
    link(graph.nodes)
    return graph, [None if m is None else made[m] for m in marked]
