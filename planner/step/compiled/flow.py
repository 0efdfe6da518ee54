"""A minimum cut (Dinic's algorithm), as `networkx.minimum_cut` would choose it among equals."""

from __future__ import annotations

from collections.abc import Sequence

INFINITE = 1 << 62


class Network:
    """A directed graph with integer capacities; vertices are numbered from 0."""

    def __init__(self, num_vertices: int) -> None:
        self.edges_of: list[list[int]] = [[] for _ in range(num_vertices)]
        self.heads: list[int] = []
        self.capacities: list[int] = []

    def connect(self, tail: int, head: int, capacity: int) -> None:
        """An edge and its residual twin, whose number differs in the last bit."""
        self.edges_of[tail].append(len(self.heads))
        self.heads.append(head)
        self.capacities.append(capacity)
        self.edges_of[head].append(len(self.heads))
        self.heads.append(tail)
        self.capacities.append(0)

    def sink_side(self, source: int, sink: int) -> set[int]:
        """The vertices on the sink's side of the minimum cut that is nearest to the sink.

        AssertionError where no finite cut exists.
        """
        while levels := self._levels(source, sink):
            self._block(source, sink, levels)
        return self._reaching(sink)

    def _levels(self, source: int, sink: int) -> list[int] | None:
        """Each vertex's distance to the sink in the residual graph; None where it is cut off."""
        levels = [-1] * len(self.edges_of)
        levels[sink] = 0
        frontier = [sink]
        heads, capacities, edges_of = self.heads, self.capacities, self.edges_of
        while frontier:
            following = []
            for vertex in frontier:
                level = levels[vertex] + 1
                for edge in edges_of[vertex]:
                    tail = heads[edge]
                    if levels[tail] < 0 and capacities[edge ^ 1] > 0:
                        levels[tail] = level
                        following.append(tail)
            if levels[source] >= 0:
                return levels
            frontier = following
        return None

    def _block(self, source: int, sink: int, levels: Sequence[int]) -> None:
        """Saturates every shortest path."""
        heads, capacities, edges_of = self.heads, self.capacities, self.edges_of
        following = [0] * len(edges_of)
        path: list[int] = []
        vertex = source
        while True:
            if vertex == sink:
                amount = min(capacities[edge] for edge in path)
                assert amount < INFINITE, "a value can neither be saved nor recomputed"
                cut = len(path)
                for position in range(len(path) - 1, -1, -1):
                    edge = path[position]
                    capacities[edge] -= amount if capacities[edge] < INFINITE else 0
                    capacities[edge ^ 1] += amount
                    if capacities[edge] == 0:
                        cut = position
                vertex = heads[path[cut] ^ 1]
                del path[cut:]
                continue
            edges = edges_of[vertex]
            level = levels[vertex] - 1
            while following[vertex] < len(edges):
                edge = edges[following[vertex]]
                if capacities[edge] > 0 and levels[heads[edge]] == level:
                    break
                following[vertex] += 1
            else:
                if vertex == source:
                    return
                edge = path.pop()
                vertex = heads[edge ^ 1]
                following[vertex] += 1
                continue
            path.append(edge)
            vertex = heads[edge]

    def _reaching(self, sink: int) -> set[int]:
        """The vertices from which the sink can still be reached."""
        found = {sink}
        stack = [sink]
        while stack:
            for edge in self.edges_of[stack.pop()]:
                tail = self.heads[edge]
                if tail not in found and self.capacities[edge ^ 1] > 0:
                    found.add(tail)
                    stack.append(tail)
        return found
