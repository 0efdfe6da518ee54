"""What runs the same operations on storages anew, read off the first time: the second optimizer
step, and a step's second micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from planner.ledger.ledger import (
    Allocated,
    Computed,
    Emptied,
    Event,
    Freed,
    Marked,
    Scratch,
    Tagged,
)

_new: Any = tuple.__new__  # a NamedTuple's own takes three times as long


def repeated(events: Iterable[Any], last_storage: int, step: int) -> tuple[list[Event], int] | None:
    """`events` once more, as optimizer step `step`, and their last storage: each that they allocate
    is a new one, numbered from `last_storage` on. None where one of them outlives `events`: then
    the first time differs from the next."""
    again: list[Event] = []
    append = again.append
    new: dict[int, int] = {}  # storage -> the one in its place; emptied as they are freed
    for event in events:
        kind = type(event)
        if kind is Computed:
            append(event)
        elif kind is Freed:
            append(_new(Freed, (new.pop(event[0], event[0]),)))
        elif kind is Allocated or kind is Scratch:
            last_storage += 1
            new[event[0]] = last_storage
            # Both have so many fields.
            _, size, label, path, last = event
            append(_new(kind, (last_storage, size, label, path, last)))
        elif kind is Tagged:
            storage, category, weight = event
            append(_new(Tagged, (new.get(storage, storage), category, weight)))
        elif kind is Marked:
            append(Marked(event.phase, step))
        else:
            assert kind is Emptied, "what was tried once is known"
    return None if new else (again, last_storage)


def adding_gradients(
    events: Sequence[Event], begun: int, first: Iterable[tuple[int, int, Sequence[Event]]]
) -> list[Event]:
    """What a micro-batch after the first does. `events` are the first one's, of which `begun` is
    the number in the step, and `first` its `Device.first_gradients`."""
    found: list[Event] = []
    done = 0
    for start, end, added in first:
        found += [*events[done : start - begun], *added]
        done = end - begun
    return [*found, *events[done:]]
