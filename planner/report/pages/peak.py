"""The peak: what is alive then, as a tree of modules and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.page.contents import Cell, Chart, Number, Part, Section, Table, Text
from planner.page.plotting import new_figure, plot_text
from planner.report.colours import COLOURS
from planner.report.pages.alive import Alive, Node, alive_at, alive_tree, equal_ones
from planner.report.pages.course import Course
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.report.pages.step import Step

NUM_ROWS = 60
_NUM_LEVELS = 5  # of the tree that are shown at once
_MODULE = "#5b6b7b"  # white text is readable on it, on light paper and on dark
# Categories whose colours are light: black is readable on them, white on all others.
_LIGHT = frozenset(COLOURS) - {"parameters"}


def peak(step: Step, course: Course, key: str) -> Section:
    """What is alive at the instant of the most."""
    live = course.live
    alive = alive_at(step.ledger, live.events[live.peak])
    parts: list[Part] = [
        Text(_sentence(step, alive)),
        _tree(alive, f"{key}-peak-chart"),
        _table(alive),
    ]
    return Section("peak", "What is alive at the peak", parts)


def _sentence(step: Step, alive: Sequence[Alive]) -> str:
    """When the peak is, and what of it is held for backward."""
    total = sum(one.num_bytes for one in alive)
    saved = [one for one in alive if one.category == "activations"]
    text = (
        f"The peak is in {step.estimate.peak_at}: {len(alive):,} storages of {format_bytes(total)}."
    )
    if saved:
        held = sum(one.num_bytes for one in saved)
        text += (
            f" {format_bytes(held)} of them ({held / total:.0%}) are activations that "
            f"forward saved for a backward still to come, in {len(saved):,} storages."
        )
    return text


def _tree(alive: Sequence[Alive], key: str) -> Chart:
    """Modules and operations: each as high as the bytes that are alive of it."""
    from plotly.graph_objects import Icicle

    nodes = list(alive_tree(alive).rows())
    total = nodes[0][1].num_bytes
    trace = Icicle(
        ids=[place for place, _, _ in nodes],
        labels=[plot_text(node.label) for _, node, _ in nodes],
        parents=[parent for _, _, parent in nodes],
        values=[node.num_bytes for _, node, _ in nodes],
        text=[f"{format_bytes(n.num_bytes)}, {n.num_bytes / total:.1%}" for _, n, _ in nodes],
        texttemplate="%{label}  %{text}",
        textfont={
            "color": ["#000000" if node.category in _LIGHT else "#ffffff" for _, node, _ in nodes]
        },
        customdata=[(plot_text(node.where), _held(node)) for _, node, _ in nodes],
        branchvalues="total",
        maxdepth=_NUM_LEVELS,
        marker={
            "colors": [
                COLOURS[node.category] if node.category else _MODULE for _, node, _ in nodes
            ],
            "line": {"width": 0.5, "color": "#ffffff"},
        },
        leaf={"opacity": 1},
        hovertemplate="%{customdata[0]}<br>%{text} of the peak<br>%{customdata[1]}<extra></extra>",
        sort=True,
    )
    said = (
        "What is alive at the peak, by module and by the operation that asked for it, what takes "
        "most on top. A box has the colour of its category, and is grey where it holds several. "
        "Click a box to look into it, and the leftmost to go back."
    )
    figure = new_figure([trace], uniformtext={"minsize": 9, "mode": "hide"})
    return Chart(key, figure, said, 760, "tree")


def _held(node: Node) -> str:
    """How many storages, and their bytes by category."""
    lines = [f"{node.count:,} storage" + ("s" if node.count != 1 else "")]
    for category, num_bytes in node.by_category.most_common():
        lines.append(f"{category.replace('_', ' ')} {format_bytes(num_bytes)}")
    return "<br>".join(lines)


def _table(alive: Sequence[Alive]) -> Table:
    groups = equal_ones(alive)
    total = sum(one.num_bytes for one in alive)
    rows: list[list[Cell]] = [
        [
            f"{group.path} ({group.label})" if group.path else group.label,
            group.category.replace("_", " "),
            Number(group.each_bytes, f"{group.num_storages:,} × {format_bytes(group.each_bytes)}"),
            Number(
                group.num_bytes,
                f"{format_bytes(group.num_bytes)}, {group.num_bytes / total:.1%}",
            ),
            group.until,
        ]
        for group in groups[:NUM_ROWS]
    ]
    shown = sum(group.num_bytes for group in groups[:NUM_ROWS])
    caption = (
        f"The largest storages at the peak, equal ones together (a star stands for any number): "
        f"{shown / total:.1%} of its {format_bytes(total)}. An activation is held for the backward "
        "that releases it."
    )
    headers = ["Asked for by", "Category", "Each", "Together", "Held until"]
    return Table(headers, rows, caption)
