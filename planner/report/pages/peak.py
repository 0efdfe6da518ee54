"""The peak: what is alive then, as a tree of modules and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.units import format_bytes
from planner.report.colours import COLOURS
from planner.report.page.contents import Cell, Folded, Number, Part, Section, Table, Text, Tree
from planner.report.pages.alive import Alive, alive_at_peak, alive_tree, equal_ones
from planner.report.pages.course import Course
from planner.report.pages.module_tree import Node, tree_part
from planner.report.pages.step import Step

NUM_ROWS = 60


def peak(step: Step, course: Course) -> Section:
    """What is alive at the instant of the most."""
    alive = alive_at_peak(step.ledger, course)
    parts: list[Part] = [
        Text(_sentence(step, alive)),
        _tree(alive),
        Folded("The largest storages", [_table(alive)], printed=False),
    ]
    return Section("peak", "What is alive at the peak", parts)


def _sentence(step: Step, alive: Sequence[Alive]) -> str:
    """When the peak is, and what of it is held for backward."""
    total = sum(one.num_bytes for one in alive)
    saved = [one for one in alive if one.category == "activations"]
    text = (
        f"The peak is in {step.estimate.peak_at}: {len(alive):,} storages hold "
        f"{format_bytes(total)}."
    )
    if saved:
        held = sum(one.num_bytes for one in saved)
        text += (
            f" Activations that forward saved for a backward still to come are "
            f"{format_bytes(held)} of it ({held / total:.0%}), in {len(saved):,} storages."
        )
    return text


def _tree(alive: Sequence[Alive]) -> Tree:
    """Modules and operations: each as high as the bytes that are alive of it."""
    said = (
        "What is alive at the peak, by module and by the operation that asked for it; what takes "
        "most is on top. A box has the colour of its category, and is grey where it holds several; "
        "equal blocks are one box."
    )
    colours = {str(category): colour for category, colour in COLOURS.items()}
    return tree_part(alive_tree(alive), said, colours, _bytes, _held)


def _bytes(amount: float) -> str:
    return format_bytes(int(amount))


def _held(node: Node) -> str:
    """How many storages, and their bytes by category."""
    lines = [f"{node.count:,} storage" + ("s" if node.count != 1 else "")]
    for category, num_bytes in sorted(node.amounts.items(), key=lambda pair: -pair[1]):
        lines.append(f"{category.replace('_', ' ')} {_bytes(num_bytes)}")
    return ", ".join(lines)


def _table(alive: Sequence[Alive]) -> Table:
    groups = equal_ones(alive)
    total = sum(one.num_bytes for one in alive)
    rows: list[list[Cell]] = [
        [
            f"{group.path} ({group.label})" if group.path else group.label,
            group.category.replace("_", " "),
            Number(group.each_bytes, f"{group.num_storages:,} × {format_bytes(group.each_bytes)}"),
            Number(
                group.num_bytes, f"{format_bytes(group.num_bytes)}, {group.num_bytes / total:.1%}"
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
