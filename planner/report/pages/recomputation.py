"""Where backward runs forward's operations once more, as checkpointing makes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from planner.ledger.ledger import IN_BACKWARD, Computed

# So many of forward's operations in a row are no accident: without checkpointing backward has at
# most three, of copies and of sums that it also needs (of the Swins of five libraries).
FEWEST_IN_A_ROW = 4
RECOMPUTATION, UPDATE = "recomputation", "updates in backward"


class Stretch(NamedTuple):
    """Operations from `start` up to, not including, `stop`, and what they are."""

    kind: str
    start: int
    stop: int


def find_stretches(operations: Sequence[tuple[str, Computed]]) -> list[Stretch]:
    """What within backward is no backward, of a step's (phase, operation) in order.

    Forward's operations in forward's order are recomputed where they are many in a row, or where
    one of them has another operation for its backward (`gelu` and `gelu_backward`).
    """
    names = {operation.name for phase, operation in operations if phase == "backward"}
    forward: dict[Computed, list[int]] = defaultdict(list)
    for place, (phase, operation) in enumerate(operations):
        if phase == "forward":
            forward[operation].append(place)
    found: list[Stretch] = []
    place = 0
    while place < len(operations):
        phase, operation = operations[place]
        length, kind = 0, RECOMPUTATION
        if phase == "backward":
            length = max(
                (_in_common(operations, at, place) for at in forward.get(operation, ())), default=0
            )
            run = operations[place : place + length]
            is_own = any(f"{each.name}_backward" in names for _, each in run)
            length = length if length >= FEWEST_IN_A_ROW or is_own else 0
        elif operation.path == IN_BACKWARD:
            length, kind = 1, UPDATE
        if length:
            _join(found, Stretch(kind, place, place + length))
        place += max(length, 1)
    return found


def _in_common(operations: Sequence[tuple[str, Computed]], first: int, second: int) -> int:
    """How many operations of forward from `first` on backward runs from `second` on."""
    count = 0
    for (phase, one), (other_phase, other) in zip(
        operations[first:], operations[second:], strict=False
    ):
        if phase != "forward" or other_phase != "backward" or one != other:
            break
        count += 1
    return count


def _join(found: list[Stretch], stretch: Stretch) -> None:
    """Append it, or let it continue the last one."""
    if found and found[-1].kind == stretch.kind and found[-1].stop == stretch.start:
        stretch = found.pop()._replace(stop=stretch.stop)
    found.append(stretch)
