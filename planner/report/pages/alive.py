"""What is alive at the peak: each storage with who asked for it and until when it is held."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.ledger import IN_BACKWARD, Allocated, Category, Computed, Freed, Ledger, Marked
from planner.memory.caching_allocator import rounded
from planner.memory.profile import find_alive

STAYS = "beyond the step"
# What takes less than this share of the peak is one box with its like: thousands cannot be seen.
LEAST_SHOWN = 1 / 500
NEARLY_ALL = 0.95
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Alive(NamedTuple):
    """A storage at the peak. `until` is when it is released: `backward of head (mm)`, or STAYS."""

    num_bytes: int
    category: Category
    label: str
    path: str
    until: str


class Likes(NamedTuple):
    """Equal storages: numbers in the paths of their modules are stars."""

    category: Category
    label: str
    path: str
    each_bytes: int
    until: str
    num_storages: int

    @property
    def num_bytes(self) -> int:
        return self.num_storages * self.each_bytes


def alive_at(ledger: Ledger, event_index: int) -> list[Alive]:
    """What is alive right after an event, oldest first."""
    alive = find_alive(ledger.events, event_index)
    until = _releases(ledger, event_index, {of.storage for of, _ in alive})
    return [
        Alive(
            rounded(of.num_bytes),
            category,
            of.label.removeprefix("aten."),
            of.path,
            until.get(of.storage, STAYS),
        )
        for of, category in alive
    ]


def _releases(ledger: Ledger, event_index: int, storages: set[int]) -> dict[int, str]:
    """When each of the storages is released, of those that are."""
    found: dict[int, str] = {}
    since: list[tuple[int, str]] = []  # since the last mark: the phase is not known yet
    during = ""
    for event in ledger.events[event_index + 1 :]:
        if type(event) is Computed:
            during = _operation(event.name, event.path)
        elif type(event) is Allocated:
            during = _operation(event.label, event.path)
        elif type(event) is Freed and event.storage in storages:
            storages.discard(event.storage)
            since.append((event.storage, during))
        elif type(event) is Marked:
            for storage, what in since:
                in_backward = what.startswith(f" of {IN_BACKWARD}")
                found[storage] = IN_BACKWARD if in_backward else f"{event.phase}{what}"
            since, during = [], ""
    return found


def _operation(name: str, path: str) -> str:
    label = name.removeprefix("aten.")
    return f" of {path} ({label})" if path else f" ({label})"


def equal_ones(alive: Sequence[Alive]) -> list[Likes]:
    """Equal storages together, what takes most in all first."""
    counts: dict[tuple[Category, str, str, int, str], int] = {}
    for one in alive:
        key = one.category, one.label, starred(one.path), one.num_bytes, starred(one.until)
        counts[key] = counts.get(key, 0) + 1
    found = [Likes(*key, count) for key, count in counts.items()]
    return sorted(found, key=lambda likes: -likes.num_bytes)


def starred(path: str) -> str:
    """`layers.*.blocks.*.mlp` of `layers.2.blocks.0.mlp`."""
    return _NUMBER.sub("*", path)


@dataclass
class Node:
    """A module, a category or an operation: the bytes of all its children, by category. `where` is
    its full name, `count` how many storages it holds."""

    label: str
    where: str
    by_category: Counter[Category] = field(default_factory=Counter)
    count: int = 0
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return self.by_category.total()

    @property
    def category(self) -> Category | None:
        """That of nearly all its bytes; None where they are of several."""
        (most, num_bytes), *_ = self.by_category.most_common(1)
        return most if num_bytes >= NEARLY_ALL * self.num_bytes else None

    def child(self, label: str, where: str, kind: str = "") -> Node:
        # A module and an operation may have one name.
        return self.children.setdefault(f"{kind}:{label}", Node(label, where))

    def rows(self, place: str = "peak", parent: str = "") -> Iterator[tuple[str, Node, str]]:
        """(id, node, id of its parent), the root first."""
        yield place, self, parent
        for number, inner in enumerate(self.children.values()):
            yield from inner.rows(f"{place}-{number}", place)


def alive_tree(alive: Sequence[Alive]) -> Node:
    """The root; the bytes of every node are the sum of its children's. What was asked for in no
    module lies under its category."""
    root = Node("alive", "alive at the peak")
    for one in alive:
        way = [root]
        for label, where in _modules(one):
            way.append(way[-1].child(label, where))
        of = f"{one.label} of {one.path}" if one.path else one.label
        way.append(way[-1].child(one.label, of, one.category))
        for node in way:
            node.by_category[one.category] += one.num_bytes
            node.count += 1
    _gather_small(root, int(root.num_bytes * LEAST_SHOWN))
    return root


def _modules(one: Alive) -> list[tuple[str, str]]:
    """(label, full name) of each module around a storage, from outside: `layers.0` is one."""
    if not one.path:
        name = one.category.replace("_", " ")
        return [(name, name)]
    found: list[tuple[str, str]] = []
    where = ""
    for name in one.path.split("."):
        where = f"{where}.{name}" if where else name
        label = f"{found.pop()[0]}.{name}" if name.isdecimal() and found else name
        found.append((label, where))
    return found


def _gather_small(node: Node, least: int) -> None:
    """Puts the children that take less than `least` together in one."""
    small = {key: inner for key, inner in node.children.items() if inner.num_bytes < least}
    if len(small) > 1:
        rest = Node(f"{len(small)} smaller", f"{node.where}: {len(small)} smaller")
        for key, inner in small.items():
            del node.children[key]
            rest.by_category += inner.by_category
            rest.count += inner.count
        node.children["small"] = rest
    for inner in node.children.values():
        _gather_small(inner, least)
