"""What a person is shown of a search while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from search.kinds import RecordT, SettingT
from search.space import Candidate


@dataclass(frozen=True)
class Progress(Generic[SettingT, RecordT]):
    """`kind` is note, start, step or end; `record` is there at an end.
    Rates in images/s, times in seconds; `probe` counts from 1, `num_probes` None is no limit."""

    kind: str
    text: str = ""
    phase: str = ""
    candidate: Candidate[SettingT] | None = None
    probe: int = 0
    num_probes: int | None = None
    best_rate: float | None = None
    seconds_left: float | None = None
    step_seconds: float | None = None
    record: RecordT | None = None


OnProgress = Callable[[Progress[SettingT, RecordT]], None]


def note_taker(on_progress: OnProgress[SettingT, RecordT]) -> Callable[[str], None]:
    """What shows a line of text as progress."""
    return lambda text: on_progress(Progress("note", text))
