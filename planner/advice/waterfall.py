"""From the plain default to a recommendation, lever by lever: what each saves and costs."""

from __future__ import annotations

from dataclasses import dataclass

from planner.advice.levers import ALLOCATOR, LEVERS
from planner.advice.table import Table
from planner.advice.wish import Choice, Wish
from planner.core.errors import PlannerError


@dataclass(frozen=True)
class Fall:
    """One lever on the way. `num_bytes` is what the device needs with it and all before it,
    `saved_bytes` how much less that is than before it; `seconds` is what the images of the wish's
    step take then, `added_seconds` how much more than before. `levers` are several where one of
    them cannot be without the other."""

    levers: tuple[str, ...]
    changes: tuple[tuple[str, object], ...]
    num_bytes: int
    saved_bytes: int
    seconds: float
    added_seconds: float
    low_bytes: int
    high_bytes: int
    as_eager: bool


def waterfall(wish: Wish, table: Table, goal: Choice) -> tuple[Fall, ...]:
    """The levers in which `goal` is not the wish, in the order of `LEVERS`. What they save adds up
    to the difference of the two, in bytes and in seconds."""
    falls: list[Fall] = []
    here = Choice(wish.plain)
    before = _cost(wish, table, here)
    names: list[str] = []
    changes: list[tuple[str, object]] = []
    done: set[str] = set()
    for lever in LEVERS:
        fields = [f for f in lever.fields if f not in done]
        after, changed = _towards(here, goal, fields)
        if not changed:
            continue
        done |= {field for field, _ in changed}
        names.append(lever.name)
        changes += changed
        here = after
        if not _runs(wish, here):
            continue
        cost = _cost(wish, table, here)
        saved, added = before[0] - cost[0], cost[1] - before[1]
        there = table.at(here)
        between = there.low_bytes, there.high_bytes, there.as_eager
        falls.append(Fall(tuple(names), tuple(changes), cost[0], saved, cost[1], added, *between))
        before, names, changes = cost, [], []
    assert here == goal, "every field of a goal belongs to a lever"
    return tuple(falls)


def _towards(
    here: Choice, goal: Choice, fields: list[str]
) -> tuple[Choice, list[tuple[str, object]]]:
    """`here` with these fields as `goal` has them, and what that changes."""
    changed = [
        (field, getattr(goal.setting, field))
        for field in fields
        if field != ALLOCATOR and getattr(here.setting, field) != getattr(goal.setting, field)
    ]
    expandable = goal.expandable if ALLOCATOR in fields else here.expandable
    said: list[tuple[str, object]] = list(changed)
    if expandable != here.expandable:
        said.append((ALLOCATOR, "expandable_segments:True"))
    return Choice(here.setting.model_copy(update=dict(changed)), expandable), said


def _runs(wish: Wish, choice: Choice) -> bool:
    try:
        wish.apply(choice, {})
    except PlannerError:
        return False
    return True


def _cost(wish: Wish, table: Table, choice: Choice) -> tuple[int, float]:
    images = wish.plain.batch_size * wish.plain.accumulate
    return table.at(choice).device_total_bytes, images / table.rate(choice)
