"""What it means that a step on shapes equals the real module's step on fake tensors.

Both are lists of events. Equal are: every allocation in order (rounded to 512 B), the releases
between two allocations (in any order), and with them the live bytes at the end of every phase and
the peak. Names of operations are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from planner.core.schema import SwinConfig, TrainSetting
from planner.ledger.ledger import Allocated, Awaited, Emptied, Event, Freed, Marked, Scratch, Sent
from planner.memory.caching_allocator import rounded
from planner.step.nn import Module
from planner.step.tensor import Device
from planner.step.training import record_training

Canonical = list[tuple[Any, ...]]


def canonical(events: Iterable[Event]) -> Canonical:
    """The events after the model was built, releases grouped and sorted by size."""
    sizes: dict[int, int] = {}
    rows: Canonical = []
    freed: list[int] = []

    def close() -> None:
        if freed:
            rows.append(("freed", tuple(sorted(freed))))
            freed.clear()

    for event in events:
        if isinstance(event, Marked):
            close()
            if event.phase == "build":
                rows.clear()
            else:
                rows.append(("end of", event.phase, event.step))
        elif isinstance(event, Allocated):
            close()
            sizes[event.storage] = rounded(event.num_bytes)
            rows.append(("allocated", rounded(event.num_bytes), event.label))
        elif isinstance(event, Scratch):
            close()
            rows.append((event.law, event.sizes))
        elif isinstance(event, Emptied):
            close()
            rows.append(("emptied", ""))
        elif isinstance(event, Freed) and sizes.get(event.storage):
            freed.append(sizes[event.storage])
    return [row for row in rows if row[:2] != ("allocated", 0)]


def phase_ends(events: Iterable[Event]) -> list[tuple[str, int, int, int]]:
    """(phase, step, live bytes at its end, peak live bytes in it)."""
    sizes: dict[int, int] = {}
    live = peak = 0
    ends = []
    for event in events:
        if isinstance(event, Allocated):
            sizes[event.storage] = rounded(event.num_bytes)
            live += sizes[event.storage]
            peak = max(peak, live)
        elif isinstance(event, Freed):
            live -= sizes.pop(event.storage, 0)  # scratch
        elif isinstance(event, Marked):
            ends.append((event.phase, event.step, live, peak))
            peak = live
    return ends[1:] if ends and ends[0][0] == "build" else ends


def first_difference(mine: Iterable[Event], real: Iterable[Event]) -> str:
    """Empty where equal, else the rows around the first difference, side by side."""
    ours, theirs = canonical(mine), canonical(real)
    for index in range(max(len(ours), len(theirs))):
        a = ours[index] if index < len(ours) else ("nothing",)
        b = theirs[index] if index < len(theirs) else ("nothing",)
        if a[:2] != b[:2]:
            lines = [f"difference at row {index} of {len(ours)} on shapes, {len(theirs)} real"]
            for i in range(max(0, index - 14), index + 10):
                left = str(ours[i]) if i < len(ours) else ""
                right = str(theirs[i]) if i < len(theirs) else ""
                mark = "  " if left.split(",")[:2] == right.split(",")[:2] else "! "
                lines.append(f"{mark}{left[:72]:<74}{right[:88]}")
            return "\n".join(lines)
    return ""


def assert_equal_steps(
    on_shapes: Callable[[Device], Module],
    real: Callable[[], Any],
    config: SwinConfig,
    setting: TrainSetting,
) -> None:
    """Two optimizer steps of both, event by event."""
    from planner.trace.run import trace_training

    ledger = record_training(on_shapes, config, setting, in_place_sums=False)
    trace = trace_training(real, config, setting)
    difference = first_difference(ledger.events, trace.events)
    assert not difference, difference
    assert phase_ends(ledger.events) == phase_ends(trace.events)
    assert ledger.num_parameters == trace.num_parameters


def collectives(events: Iterable[Event]) -> list[tuple[Any, ...]]:
    """What is sent and awaited, but for the paths: backward runs in no module of a trace."""
    return [tuple(e)[:6] for e in events if isinstance(e, Sent | Awaited)]
