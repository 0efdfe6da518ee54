"""What a trace says: live bytes by phase, at the peak and held for backward."""

from __future__ import annotations

from collections.abc import Iterator

from planner.ledger.ledger import Allocated, Event, Freed, Marked, Scratch
from planner.memory.profile import walk
from planner.trace.run import Trace


def storages(trace: Trace) -> list[Allocated | Scratch | Freed | Marked]:
    """The events without what is computed and what storages are for."""
    return [e for e in trace.events if isinstance(e, Allocated | Scratch | Freed | Marked)]


def _live(trace: Trace) -> Iterator[tuple[Event, int]]:
    """Each event with the live bytes after it, every request rounded up to 512 B."""
    return zip(trace.events, walk(trace.events).live, strict=True)


def phase_ends(trace: Trace, step: int | None = None) -> list[tuple[str, int]]:
    """(phase, live bytes at its end) of optimizer step `step` (None: the last), in order."""
    step = trace.num_steps - 1 if step is None else step
    return [
        (event.phase, total)
        for event, total in _live(trace)
        if isinstance(event, Marked) and event.step == step and event.phase != "build"
    ]


def peak_live_bytes(trace: Trace, step: int | None = None) -> int:
    """Most bytes alive at once in optimizer step `step` (the last when None), and in the
    validation right after it."""
    step = trace.num_steps - 1 if step is None else step
    peak, found = 0, None
    for event, total in _live(trace):
        peak = max(peak, total)
        if isinstance(event, Marked):
            if event.step == step and event.phase in ("zero_grad", "validation"):
                found = max(peak, found or 0)
            if event.phase in ("build", "zero_grad"):
                peak = total
    if found is None:
        raise ValueError(f"the trace has no step {step}")
    return found


def saved_bytes(trace: Trace) -> int:
    """Live at the end of the first forward of the steady step, less live before it."""
    before = 0
    for event, total in _live(trace):
        if isinstance(event, Marked):
            if event.step == trace.num_steps - 1 and event.phase == "forward":
                return total - before
            before = total
    raise ValueError("the trace has no forward")
