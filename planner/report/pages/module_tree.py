"""Amounts by module as a tree, and the picture of one: bytes at the peak, seconds of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.page.contents import Chart
from planner.page.plotting import new_figure, plot_text, text_colour

# What takes less than this share of the whole is one box with its like: thousands cannot be seen.
LEAST_SHOWN = 1 / 500
SMALLER = "smaller ones"
# A box has the colour of a kind that makes up at least this share of it.
_NEARLY_ALL = 0.95
_SEVERAL_KINDS = "#5b6b7b"
_NUM_LEVELS = 5  # shown at once; assets/tree.js shows fewer where there is little room
_HEIGHT_PX = 760

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

    def rows(self, place: str = "all", parent: str = "") -> Iterator[tuple[str, Node, str]]:
        """(id, node, id of its parent), the root first."""
        yield place, self, parent
        for number, inner in enumerate(self.children.values()):
            yield from inner.rows(f"{place}-{number}", place)

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


def tree_chart(
    root: Node,
    key: str,
    said: str,
    colours: Mapping[str, str],
    text: Callable[[float], str],
    details: Callable[[Node], str],
) -> Chart:
    """Boxes, each as high as its amount. `colours` are those of kinds, `text` writes an amount, and
    `details` are further lines under the pointer."""
    from plotly.graph_objects import Icicle

    nodes = list(root.rows())
    total = root.amount
    filled = [colours.get(node.kind, _SEVERAL_KINDS) for _, node, _ in nodes]
    trace = Icicle(
        ids=[place for place, _, _ in nodes],
        labels=[plot_text(node.label) for _, node, _ in nodes],
        parents=[parent for _, _, parent in nodes],
        values=[node.amount for _, node, _ in nodes],
        text=[f"{text(n.amount)}, {n.amount / total:.1%}" for _, n, _ in nodes],
        texttemplate="%{label}  %{text}",
        textfont={"color": [text_colour(colour) for colour in filled]},
        customdata=[(plot_text(node.where), details(node)) for _, node, _ in nodes],
        branchvalues="total",
        maxdepth=_NUM_LEVELS,
        marker={"colors": filled, "line": {"width": 0.5, "color": "#ffffff"}},
        leaf={"opacity": 1},
        hovertemplate="%{customdata[0]}<br>%{text}<br>%{customdata[1]}<extra></extra>",
        sort=True,
    )
    figure = new_figure([trace], uniformtext={"minsize": 9, "mode": "hide"})
    return Chart(key, figure, said, _HEIGHT_PX, "tree")
