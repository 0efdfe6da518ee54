"""Inductor's clean-up of the joint graph before it is partitioned, and AOTAutograd's.

`joint_graph_passes` in torch/_inductor/fx_passes/joint_graph.py and `fx_graph_cse` in
torch/_functorch/compile_utils.py, as far as they change a vision transformer's graph.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.step.compiled.graph import Graph, Value, link
from planner.step.tensor import DTYPE_BYTES, FLOATING

_NEVER_MERGED = frozenset((
    "primal", "tangent", "empty", "bernoulli", "inductor_random", "native_dropout",
))  # fmt: skip


def simplify(graph: Graph) -> Graph:
    """The graph as the partitioner gets it: linked, without dead nodes, equal ones merged."""
    graph.finished()
    for rewrite in (_undo_pair, _convert_once):
        _apply(graph, rewrite)
        graph.finished()
    _merge_equal(graph)
    return graph.finished()


def _apply(graph: Graph, rewrite: Callable[[Value], Value]) -> None:
    """Replaces every node by what `rewrite` makes of it, in order."""
    replaced: dict[Value, Value] = {}
    for position, node in enumerate(graph.nodes):
        node.inputs = tuple([replaced.get(source, source) for source in node.inputs])
        found = rewrite(node)
        if found is not node:
            replaced[node] = found
            if found.index < 0:
                graph.nodes[position] = found
    _replace_results(graph, replaced)


def _replace_results(graph: Graph, replaced: dict[Value, Value]) -> None:
    graph.outputs = [replaced.get(node, node) for node in graph.outputs]
    graph.gradients = [None if g is None else replaced.get(g, g) for g in graph.gradients]


def _undo_pair(node: Value) -> Value:
    """`pointless_view`, `pointless_view_pair`, `pointless_permute_pair`: the inner one of a pair
    has no other user."""
    if node.op == "view" and node.shape == node.inputs[0].shape:
        return node.inputs[0]
    if node.op in ("view", "permute") and node.inputs[0].op == node.op:
        inner = node.inputs[0]
        if len(inner.users) == 1:
            source = inner.inputs[0]
            if node.op == "view" and node.shape == source.shape:
                return source
            if node.op == "permute" and _is_inverse(inner.constant, node.constant):
                return source
    return node


def _is_inverse(first: object, second: object) -> bool:
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    return all(first[d] == i for i, d in enumerate(second))


def _convert_once(node: Value) -> Value:
    """`pointless_convert`: a conversion on the way to another goes, unless it was to a narrower
    type than the last."""
    if node.op != "convert_element_type" or node.inputs[0].op != "convert_element_type":
        return node
    inner = node.inputs[0]
    source = inner.inputs[0]
    if len(inner.users) > 1 or not {source.dtype, inner.dtype, node.dtype} <= FLOATING:
        return node
    if DTYPE_BYTES[inner.dtype] < DTYPE_BYTES[node.dtype]:
        return node
    return Value(
        node.op, (source,), node.shape, node.dtype, node.dtype, node.strides, node.region,
        path=node.path,
    )  # fmt: skip


def _merge_equal(graph: Graph) -> None:
    """`fx_graph_cse`."""
    first: dict[object, Value] = {}
    replaced: dict[Value, Value] = {}
    kept = []
    for node in graph.nodes:
        node.inputs = tuple([replaced.get(source, source) for source in node.inputs])
        if node.op not in _NEVER_MERGED:
            key = (node.op, node.inputs, node.shape, node.dtype, node.constant)
            known = first.setdefault(key, node)
            if known is not node:
                replaced[node] = known
                continue
        kept.append(node)
    graph.nodes = kept
    _replace_results(graph, replaced)
    link(graph.nodes)
