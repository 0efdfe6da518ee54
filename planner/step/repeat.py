"""The second optimizer step, read off the first: it runs the same operations on storages anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
            new[event.storage] = last_storage
            event = event._replace(storage=last_storage)
        elif type(event) is Freed:
            event = Freed(new.pop(event.storage, event.storage))
        elif type(event) is Tagged:
            event = event._replace(storage=new.get(event.storage, event.storage))
        elif type(event) is Marked:
            event = Marked(event.phase, step)
        elif type(event) is Sent or type(event) is Awaited:
            event = event._replace(handle=event.handle + last_handle)
        again.append(event)
    return None if new else again


def num_allocated(events: Sequence[Event]) -> int:
    """How many storages `events` allocate."""
    return sum(isinstance(event, Allocated | Scratch) for event in events)
