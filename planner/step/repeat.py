"""What runs the same operations on storages anew, read off the first time: the second optimizer
step, and a step's second micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from planner.ledger.ledger import (
    Allocated,
    Awaited,
    Emptied,
    Event,
    Freed,
    Marked,
    Scratch,
    Sent,
    Tagged,
)

_new: Any = tuple.__new__  # a NamedTuple's own takes three times as long


def repeated(
    events: Iterable[Event], last_storage: int, step: int, last_handle: int = 0
) -> list[Event] | None:
    """`events` once more, as optimizer step `step`: each storage that they allocate is a new one,
    numbered from `last_storage` on, and each collective from `last_handle` on. None where one of
    them outlives `events`: then the first time differs from the next."""
    again: list[Event] = []
    new: dict[int, int] = {}  # storage -> the one in its place; emptied as they are freed
    for event in events:
        if type(event) is Emptied:
            continue  # what was tried once is known
        if type(event) is Allocated or type(event) is Scratch:
            last_storage += 1
            new[event[0]] = last_storage
            event = _new(type(event), (last_storage, *event[1:]))
        elif type(event) is Freed:
            event = _new(Freed, (new.pop(event[0], event[0]),))
        elif type(event) is Tagged:
            event = _new(Tagged, (new.get(event[0], event[0]), *event[1:]))
        elif type(event) is Marked:
            event = Marked(event.phase, step)
        elif type(event) is Sent or type(event) is Awaited:
            event = event._replace(handle=event.handle + last_handle)
        again.append(event)
    return None if new else again


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


def num_allocated(events: Sequence[Event]) -> int:
    """How many storages `events` allocate."""
    return sum(isinstance(event, Allocated | Scratch) for event in events)
