"""What is alive at the peak: each storage with who asked for it and until when it is held."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from planner.ledger.ledger import IN_BACKWARD, Category, Ledger
from planner.memory.caching_allocator import rounded
from planner.memory.profile import find_alive
from planner.report.pages.course import Course, Move
from planner.report.pages.module_tree import LEAST_SHOWN, Node, module_way

STAYS = "beyond the step"
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


def alive_at_peak(ledger: Ledger, course: Course) -> list[Alive]:
    """What is alive at the peak, oldest first."""
    live = course.live
    until = _releases(course)
    return [
        Alive(
            rounded(of.num_bytes),
            category,
            of.label.removeprefix("aten."),
            of.path,
            until.get(of.storage, STAYS),
        )
        for of, category in find_alive(ledger.events, live.events[live.peak])
    ]


def _releases(course: Course) -> dict[int, str]:
    """When each storage is released that is so after the peak."""
    live = course.live
    found: dict[int, str] = {}
    for phase in live.phases:
        for point in range(max(phase.start, live.peak + 1), phase.stop):
            move = course.moves[point - 1]
            if move.num_bytes < 0:
                found[move.storage] = _during(move, phase.name)
    return found


def _during(move: Move, phase: str) -> str:
    """The phase, and the operation that ran last."""
    label = f" ({move.during.removeprefix('aten.')})" if move.during else ""
    if move.at == IN_BACKWARD:
        return IN_BACKWARD
    return f"{phase} of {move.at}{label}" if move.at else f"{phase}{label}"


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


def alive_tree(alive: Sequence[Alive]) -> Node:
    """The root; the bytes of every node are the sum of its children's. What was asked for in no
    module lies under its category."""
    root = Node("alive", "alive at the peak")
    for one in alive:
        name = one.category.replace("_", " ")
        way = module_way(one.path) if one.path else [(name, name)]
        of = f"{one.label} of {one.path}" if one.path else one.label
        root.add(way, (one.label, of), one.category, one.num_bytes)
    root.join_equals()
    root.gather(root.amount * LEAST_SHOWN)
    return root
