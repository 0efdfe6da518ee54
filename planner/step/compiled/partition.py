"""Which values forward keeps for backward: torch.compile's min-cut rematerialisation partitioner.

`min_cut_rematerialization_partition` of torch/_functorch/partitioners.py (torch 2.13) with its
default options (`activation_memory_budget` 1). Each value that backward needs is saved, or
recomputed from values that are; the cheapest choice is a minimum cut, after bans that keep
recomputation to what fuses into backward's kernels for nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass

from planner.step.compiled.flow import INFINITE, Network
from planner.step.compiled.graph import Graph, Value
from planner.step.compiled.operators import FUSIBLE, RECOMPUTABLE, VIEWS

_FAR = 10**9  # the distance from backward of what backward does not use
_MAX_DISTANCE = 1000  # config.max_dist_from_bw
_LONG_CHAIN = 100  # nodes of forward that a chain of fusible ones may span
_LISTED = {"cat": 0, "index": 1}  # operations whose further arguments are a list
_REDUCTION = 4  # an output so many times smaller than its inputs is a reduction's


@dataclass(frozen=True)
class Partition:
    """`saved` are the values forward keeps, inputs of forward among them, in the graph's order;
    `forward` what it computes from its inputs, those included."""

    graph: Graph
    saved: tuple[Value, ...]
    forward: frozenset[Value]

    def forward_nodes(self) -> list[Value]:
        """What forward computes, in order."""
        return [n for n in self.graph.nodes if n in self.forward and n.op != "primal"]

    def backward_nodes(self) -> list[Value]:
        """What backward computes, recomputed values where they are first needed: the order of
        `reordering_to_mimic_autograd_engine`."""
        gradients = [g for g in self.graph.gradients if g is not None]
        needed = _ancestors(gradients, until=frozenset(self.saved))
        done = {*self.saved, *(n for n in self.graph.nodes if n.op in ("primal", "tangent"))}
        ordered: list[Value] = []
        started = False
        for node in self.graph.nodes:
            if node not in needed or node in done:
                continue
            started = started or any(source.op == "tangent" for source in node.inputs)
            if started:
                missing = _ancestors([node], until=done) - done
                done |= missing
                ordered += sorted(missing, key=lambda n: n.index)
        return ordered

    def saved_intermediates(self) -> list[Value]:
        """What is kept besides inputs."""
        return [node for node in self.saved if node.op != "primal"]

    def saved_bytes(self) -> int:
        return sum(node.num_bytes for node in self.saved_intermediates())


def partition(graph: Graph) -> Partition:
    """The min-cut partition of a finished joint graph."""
    return _Partitioner(graph).solve()


def fuses(producer: Value, consumer: Value) -> bool:
    """`is_fusible`: whatever produces may be fused into a concatenation, which itself may not."""
    if consumer.op == "cat":
        return True
    return producer.op in FUSIBLE and consumer.op in FUSIBLE


class _Partitioner:
    """One run over one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.after_tangents = _closure([n for n in graph.nodes if n.op == "tangent"])
        self.in_forward = _ancestors(graph.outputs)
        self.forward_nodes = [node for node in graph.nodes if node in self.in_forward]
        self.order = {node: position for position, node in enumerate(self.forward_nodes)}
        self.must_save: set[Value] = set()
        self._save_boundaries()
        self.distance = self._distances()
        self.banned: set[Value] = set()

    def _save_boundaries(self) -> None:
        """`cleanup_recompute_tags`: what one checkpointed region hands to the next is saved."""
        for node in self.graph.nodes:
            if node.region and any(user.region > node.region for user in node.users):
                self.must_save.add(node)

    def _recomputes(self, node: Value) -> bool:
        """`must_recompute`: the node is inside a checkpointed region."""
        return bool(node.region) and node not in self.must_save

    def _distances(self) -> dict[Value, int]:
        """Of each node, the steps to the nearest one that backward alone computes."""
        distance: dict[Value, int] = {}
        for node in reversed(self.graph.nodes):
            if node not in self.in_forward:
                distance[node] = 0
            else:
                distance[node] = min((distance[u] + 1 for u in node.users), default=_FAR)
        return distance

    def solve(self) -> Partition:
        nodes = self.graph.nodes
        network = Network(2 * len(nodes) + 2)
        source, sink = 2 * len(nodes), 2 * len(nodes) + 1
        needed = {g for g in self.graph.gradients if g is not None}
        for node in nodes:
            into, out = 2 * node.index, 2 * node.index + 1
            if node in self.after_tangents:
                network.connect(into, sink, INFINITE)
                continue
            if node in needed:
                network.connect(out, sink, INFINITE)
            if self._recomputes(node):
                network.connect(into, sink, INFINITE)
                continue
            if node.op == "primal" or (node in self.in_forward and self._is_costly(node)):
                self._ban(node)
            network.connect(into, out, self._weight(node))
            for user in node.users:
                network.connect(out, 2 * user.index, INFINITE)
        self._ban_uses_far_apart()
        self._ban_long_chains()
        for node in self.banned:
            network.connect(source, 2 * node.index, INFINITE)
        behind = network.sink_side(source, sink)
        saved = [n for n in nodes if 2 * n.index + 1 in behind and 2 * n.index not in behind]
        return self._halves(saved)

    def _halves(self, saved: list[Value]) -> Partition:
        """What each half computes; a saved value that backward turns out not to use is dropped."""
        gradients = [g for g in self.graph.gradients if g is not None]
        used = _ancestors(gradients, until=frozenset(saved))
        saved = [node for node in saved if node in used]
        return Partition(
            self.graph,
            tuple(saved),
            frozenset(_ancestors([*self.graph.outputs, *saved])),
        )

    def _ban(self, node: Value) -> None:
        """`ban_recomputation_if_allowed`."""
        if node.op not in VIEWS and not self._recomputes(node):
            self.banned.add(node)

    def _is_costly(self, node: Value) -> bool:
        """`should_ban_recomputation`."""
        if node.op in ("primal", "tangent", "getitem"):
            return False
        if node in self.must_save or node.op not in RECOMPUTABLE:
            return True
        if self._is_materialized_backwards(node):
            return True
        if _MAX_DISTANCE < self.distance[node] < 1000:
            return True
        # Only what is an argument by itself counts, not what is in a list of them.
        arguments = node.inputs[: _LISTED.get(node.op, len(node.inputs))]
        return _size_of(node) * _REDUCTION < sum(_size_of(source) for source in arguments)

    def _is_materialized_backwards(self, node: Value) -> bool:
        """Whether backward needs it in memory, itself or a view of it, and not in a register."""
        if node.op in VIEWS:
            return False
        stack, seen = [node], {node}
        while stack:
            current = stack.pop()
            for user in current.users:
                if user not in self.in_forward and not fuses(current, user):
                    return True
                if user.op in VIEWS and user not in seen:
                    seen.add(user)
                    stack.append(user)
        return False

    def _weight(self, node: Value) -> int:
        """`get_node_weight`: a value is the dearer the farther from backward it is made."""
        if node.shape is None:
            return INFINITE
        if node.op == "primal" and node.is_static:
            return 0
        weight = int(node.num_bytes * 1.1 ** max(min(self.distance[node], 100), 1))
        if node.op == "primal" or not all(fuses(node, user) for user in node.users):
            return weight
        return 2 * weight

    def _ban_uses_far_apart(self) -> None:
        """A value used nearby and again behind something unfusible: the far use is not redone."""
        for node in self.forward_nodes:
            users = [user for user in node.users if user in self.in_forward]
            if not users:
                continue
            first = self._first_unfusible(users, max(self.order[user] for user in users))
            for user in users:
                if self.order[user] > first and fuses(node, user) and user not in self.banned:
                    self._ban(user)

    def _first_unfusible(self, start: list[Value], last: int) -> int:
        """The position of the first node, on the ways from `start`, that does not fuse."""
        queue = [(self.order[node], True) for node in start]
        heapq.heapify(queue)
        waiting = set(queue)
        while queue:
            entry = heapq.heappop(queue)
            waiting.discard(entry)
            position, is_fusible = entry
            if not is_fusible:
                return position
            node = self.forward_nodes[position]
            for user in node.users:
                if user not in self.in_forward or self.order[user] > last:
                    continue
                found = (self.order[user], fuses(node, user))
                if found not in waiting:
                    waiting.add(found)
                    heapq.heappush(queue, found)
        return last

    def _ban_long_chains(self) -> None:
        """Breaks chains of fusible nodes that would reach from one end of the model to another."""
        visited: set[Value] = set()
        for start in range(len(self.forward_nodes)):
            queue = [start]
            while queue:
                position = heapq.heappop(queue)
                node = self.forward_nodes[position]
                if node in visited:
                    continue
                visited.add(node)
                if position > start + _LONG_CHAIN and not queue:
                    self._ban(node)
                    break
                for user in node.users:
                    if user in self.in_forward and fuses(node, user) and user not in self.banned:
                        heapq.heappush(queue, self.order[user])


def _size_of(node: Value) -> int:
    """A tuple's size is its parts'."""
    if node.shape is None:
        return sum(user.num_bytes for user in node.users if user.op == "getitem")
    return node.num_bytes


def _closure(start: list[Value]) -> set[Value]:
    """The nodes that depend on `start`, and it."""
    found = set(start)
    stack = list(start)
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def _ancestors(start: list[Value], until: Container[Value] = ()) -> set[Value]:
    """`start` and what it depends on, without going on behind `until`."""
    found = set(start)
    stack = list(start)
    while stack:
        node = stack.pop()
        for source in () if node in until else node.inputs:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found
