"""What a person is shown of a search while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from search.loop.space import Candidate
from search.probe.kinds import RecordT, SettingT


@dataclass(frozen=True)
class Progress(Generic[SettingT, RecordT]):
    """`kind` is note, start, step or end; `record` is there at an end, `best` is the best so far.
    Times in seconds; `probe` counts from 1, `num_probes` None is no limit. A start says when the
    probe is given up on (`deadline_seconds`), a step how many took `step_seconds` each."""

    kind: str
    text: str = ""
    phase: str = ""
    candidate: Candidate[SettingT] | None = None
    probe: int = 0
    num_probes: int | None = None
    best: RecordT | None = None
    seconds_left: float | None = None
    deadline_seconds: float | None = None
    num_steps: int = 0
    step_seconds: float | None = None
    record: RecordT | None = None


OnProgress = Callable[[Progress[SettingT, RecordT]], None]


def note_taker(on_progress: OnProgress[SettingT, RecordT]) -> Callable[[str], None]:
    """What shows a line of text as progress."""
    return lambda text: on_progress(Progress("note", text))


def step_progress(
    phase: str, num_steps: int, step_seconds: float | None
) -> Progress[SettingT, RecordT]:
    """Where a running probe is."""
    return Progress("step", phase, num_steps=num_steps, step_seconds=step_seconds)
