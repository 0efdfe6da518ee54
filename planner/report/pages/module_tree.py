"""Amounts by module as a tree, and the picture of one: bytes at the peak, seconds of a step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.report.page.contents import Box, Cell, Number, Table, Tree
from planner.report.page.plotting import STEEL, text_colour

# What takes less than this share of the whole is one box with its like: thousands cannot be seen.
LEAST_SHOWN = 1 / 150
SMALLER = "smaller ones"
# A box has the colour of a kind that makes up at least this share of it.
_NEARLY_ALL = 0.95
SEVERAL_KINDS = STEEL
LEVEL = "\N{EN SPACE}"  # before a row's name, for each node that it lies in
_GROW = 1e6  # of the whole: less than 1 in all would not fill a box
_NUMBERED = re.compile(r"\d+$")

# What a leaf lies in, from outside: (label, full name) of each.
Way = Sequence[tuple[str, str]]


@dataclass
class Node:
    """A module, a phase, an operation …: `amounts` by kind and `count` are those of all the leaves
    that it holds. `where` is its full name."""

    label: str
    where: str
    amounts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    count: int = 0
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def amount(self) -> float:
        return sum(self.amounts.values())

    @property
    def kind(self) -> str:
        """That of nearly all its amount; "" where it holds several."""
        most = max(self.amounts, key=self.amounts.__getitem__)
        return most if self.amounts[most] >= _NEARLY_ALL * self.amount else ""

    def add(self, way: Way, leaf: tuple[str, str], kind: str, amount: float) -> None:
        """Adds one leaf, (label, full name), within the modules of `way`."""
        node = self
        node._count(kind, amount)
        for label, where in way:
            node = node.children.setdefault(label, Node(label, where))
            node._count(kind, amount)
        # A module and an operation may have one name.
        node = node.children.setdefault(f"{kind}:{leaf[0]}", Node(*leaf))
        node._count(kind, amount)

    def _count(self, kind: str, amount: float) -> None:
        self.amounts[kind] += amount
        self.count += 1

    def rows(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        """(depth, node), the root first, and what takes most before what takes less."""
        yield depth, self
        for inner in sorted(self.children.values(), key=lambda node: -node.amount):
            yield from inner.rows(depth + 1)

    def join_equals(self) -> None:
        """Makes one child of those that differ by a number only: 18 equal blocks are one box."""
        alike: dict[object, list[Node]] = {}
        for inner in self.children.values():
            inner.join_equals()
            alike.setdefault(inner._likeness(), []).append(inner)
        joined = [_together(nodes) for nodes in alike.values()]
        self.children = {f"{number}": node for number, node in enumerate(joined)}

    def _likeness(self) -> object:
        amounts = tuple((kind, f"{amount:.6g}") for kind, amount in self.amounts.items())
        inner = tuple(node._likeness() for node in self.children.values())
        return _NUMBERED.sub("", self.label), self.count, amounts, inner

    def gather(self, least: float) -> None:
        """Puts children that have less than `least` together in one; what is so small itself shows
        none."""
        small = {key: inner for key, inner in self.children.items() if inner.amount < least}
        if self.amount < least:
            self.children.clear()
        elif len(small) > 1:
            name = f"{len(small)} {SMALLER}"
            rest = Node(name, f"{self.where}: {name}")
            for key, inner in small.items():
                del self.children[key]
                rest.count += inner.count
                for kind, amount in inner.amounts.items():
                    rest.amounts[kind] += amount
            self.children["small"] = rest
        for inner in self.children.values():
            inner.gather(least)


def module_way(path: str) -> list[tuple[str, str]]:
    """The modules of a path from outside. `layers.0` is one, as a list of modules computes nothing
    itself."""
    found: list[tuple[str, str]] = []
    where = ""
    for name in path.split("."):
        where = f"{where}.{name}" if where else name
        label = f"{found.pop()[0]}.{name}" if name.isdecimal() and found else name
        found.append((label, where))
    return found


def _together(nodes: Sequence[Node]) -> Node:
    """One node of all, named after their numbers."""
    first = nodes[0]
    if len(nodes) == 1:
        return first
    numbers = [int(found[0]) for node in nodes if (found := _NUMBERED.search(node.label))]
    named = first.label
    if len(set(numbers)) == len(nodes):
        named = f"{_NUMBERED.sub('', first.label)}{_listed(numbers)} ×{len(nodes)}"
    whole = Node(named, f"{first.where.removesuffix(first.label)}{named}")
    for node in nodes:
        whole.count += node.count
        for kind, amount in node.amounts.items():
            whole.amounts[kind] += amount
    inner = zip(*(node.children.values() for node in nodes), strict=True)
    whole.children = {f"{number}": _together(each) for number, each in enumerate(inner)}
    return whole


def _listed(numbers: Sequence[int]) -> str:
    """`3–20`, `0, 2 … 16`: a range where none is left out."""
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}–{numbers[-1]}"
    listed = [str(number) for number in numbers]
    return ", ".join(listed if len(listed) < 4 else [*listed[:2], f"… {listed[-1]}"])


def tree_part(
    root: Node,
    said: str,
    colours: Mapping[str, str],
    text: Callable[[float], str],
    details: Callable[[Node], str],
) -> Tree:
    """Boxes, each as high as its amount. `colours` are those of kinds, `text` writes an amount, and
    `details` says more of it."""
    total = root.amount

    def shown(node: Node) -> str:
        return f"{text(node.amount)}, {node.amount / total:.1%}"

    def box(node: Node) -> Box:
        colour = colours.get(node.kind, SEVERAL_KINDS)
        inner = sorted(node.children.values(), key=lambda one: -one.amount)
        return Box(
            f"{node.label}  {shown(node)}", _GROW * node.amount / total,
            colour, text_colour(colour),
            f"{node.where}\n{shown(node)}\n{details(node)}", [box(one) for one in inner],
        )  # fmt: skip

    rows: list[list[Cell]] = [
        [f"{LEVEL * depth}{node.label}", Number(node.amount, shown(node)), details(node)]
        for depth, node in root.rows()
    ]
    return Tree(box(root), said, Table(["Part", "Amount", "Of it"], rows, "The boxes above."))
