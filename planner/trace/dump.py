"""A trace as text, to lay beside another: one line per allocation, release and phase end."""

from __future__ import annotations

from collections.abc import Iterator

from planner.ledger import Allocated, Freed, Marked
from planner.trace.run import Trace


def format_events(trace: Trace) -> Iterator[str]:
    """`+`/`-`, bytes asked for, live bytes after it (requests rounded to 512 B), storage, label."""
    born: dict[int, Allocated] = {}
    for event, live in trace.live():
        if isinstance(event, Allocated):
            born[event.storage] = event
            yield f"+ {event.num_bytes:>12} {live:>14} #{event.storage:<6} {event.label}"
        elif isinstance(event, Freed):
            was = born.pop(event.storage)
            yield f"- {was.num_bytes:>12} {live:>14} #{was.storage:<6} {was.label}"
        elif isinstance(event, Marked):
            yield f"= {event.phase} {event.step}: live {live}"
