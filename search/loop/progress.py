"""What a person is shown of a search while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.core.schema import MeasurementRecord
from search.loop.space import Candidate


@dataclass(frozen=True)
class Progress:
    """`kind` is note, start, step or end; `record` is there at an end, `best` is the best so far.
    Times in seconds; `probe` counts from 1, `num_probes` None is no limit. A start says when the
    probe is given up on (`deadline_seconds`), a step how many took `step_seconds` each."""

    kind: str
    text: str = ""
    phase: str = ""
    candidate: Candidate | None = None
    probe: int = 0
    num_probes: int | None = None
    best: MeasurementRecord | None = None
    seconds_left: float | None = None
    deadline_seconds: float | None = None
    num_steps: int = 0
    step_seconds: float | None = None
    record: MeasurementRecord | None = None


OnProgress = Callable[[Progress], None]


def note_taker(on_progress: OnProgress) -> Callable[[str], None]:
    """What shows a line of text as progress."""
    return lambda text: on_progress(Progress("note", text))


def step_progress(phase: str, num_steps: int, step_seconds: float | None) -> Progress:
    """Where a running probe is."""
    return Progress("step", phase, num_steps=num_steps, step_seconds=step_seconds)
