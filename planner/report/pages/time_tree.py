"""The seconds of a step as a tree: modules, and the operations within them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from planner.throughput.parts import Cost
from planner.throughput.timeline import OTHERS, WAITING

# What takes less than this share of a step is one box with its like: thousands cannot be seen.
_LEAST_SHOWN = 1 / 400
SMALLER = "smaller ones"


@dataclass
class Node:
    """A module, a phase or an operation: `seconds` are those of all its children. `where` is its
    full name, `kind` is "" for all but operations."""

    label: str
    where: str
    kind: str = ""
    seconds: float = 0.0
    children: dict[str, Node] = field(default_factory=dict)

    def child(self, label: str, where: str, kind: str = "") -> Node:
        # A module and an operation may have one name.
        return self.children.setdefault(f"{kind}:{label}", Node(label, where, kind))

    def rows(self, place: str = "step", parent: str = "") -> Iterator[tuple[str, Node, str]]:
        """(id, node, id of its parent), the root first."""
        yield place, self, parent
        for number, inner in enumerate(self.children.values()):
            yield from inner.rows(f"{place}-{number}", place)


def time_tree(costs: Iterable[Cost]) -> Node:
    """The root; the seconds of every node are the sum of its children's. Forward and backward of a
    module are in one node; what runs in no module lies under its phase, and waits by themselves."""
    root = Node("step", "step")
    for cost in costs:
        if cost.seconds <= 0:
            continue
        way = [root]
        for label, where in _names(cost):
            way.append(way[-1].child(label, where))
        label = cost.name.removeprefix("aten.") or cost.kind
        of = f" of {cost.path}" if cost.path else ""
        shown = f"{cost.phase}: {label}" if cost.name else cost.phase
        way.append(way[-1].child(shown, f"{cost.phase}{of} ({label})", cost.kind))
        for node in way:
            node.seconds += cost.seconds
    _gather_small(root, root.seconds * _LEAST_SHOWN)
    return root


def _names(cost: Cost) -> list[tuple[str, str]]:
    """(label, full name) of each module that holds an operation, from outside: `layers.0` is one,
    as a list of modules computes nothing itself."""
    if not cost.name and cost.kind in (WAITING, OTHERS):
        return [(cost.kind, cost.kind)]
    if not cost.path or cost.phase not in ("forward", "backward"):
        return [(cost.phase, cost.phase)]
    found: list[tuple[str, str]] = []
    where = ""
    for name in cost.path.split("."):
        where = f"{where}.{name}" if where else name
        label = f"{found.pop()[0]}.{name}" if name.isdecimal() and found else name
        found.append((label, where))
    return found


def _gather_small(node: Node, least: float) -> None:
    """Puts the children that take less than `least` together in one."""
    small = {key: inner for key, inner in node.children.items() if inner.seconds < least}
    if len(small) > 1:
        for key in small:
            del node.children[key]
        node.children["small"] = Node(
            f"{len(small)} {SMALLER}",
            f"{node.where}: {len(small)} {SMALLER}",
            seconds=sum(inner.seconds for inner in small.values()),
        )
    elif len(node.children) == 1 and node.seconds < least:
        node.children.clear()
    for inner in node.children.values():
        _gather_small(inner, least)
