"""What a person is shown of a search while it runs, one line at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.core.schema import MeasurementRecord
from planner.core.units import format_seconds
from planner.report.searches import memory_text
from planner.report.settings import describe_setting
from search.loop.space import Candidate


@dataclass(frozen=True)
class Progress:
    """`kind` is note, start, step or end; `record` is there at an end, `best` is the best so far.
    `phase` is the search's, and of a step its worker's. Times in seconds; `probe` counts from 1,
    `num_probes` None is no limit. A start says when the probe is given up on (`deadline_seconds`),
    a step how many took `step_seconds` each."""

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


def progress_line(progress: Progress) -> str:
    """Phase, probe n of N, the setting, what it found, the best so far, time left; "" for what is
    no line of its own."""
    if progress.kind == "note":
        return progress.text
    if progress.kind not in ("start", "end") or progress.candidate is None:
        return ""
    of = f" of {progress.num_probes}" if progress.num_probes else ""
    setting = describe_setting(progress.candidate.setting)
    parts = [f"[{progress.phase}] probe {progress.probe}{of}: {setting}"]
    if progress.record is not None:
        parts.append(_outcome(progress.record))
    if progress.best is not None:
        parts.append(f"best {rate_text(progress.best)}")
    if progress.seconds_left is not None:
        left = progress.seconds_left
        parts.append(f"{format_seconds(left)} left" if left > 0 else "no time left")
    return " · ".join(parts)


def rate_text(record: MeasurementRecord) -> str:
    """What a probe that was measured reached."""
    return f"{record.images_per_second or 0:.4g} {record.counts}/s"


def _outcome(record: MeasurementRecord) -> str:
    """What a probe found, or how it ended instead."""
    if record.status != "measured" or record.images_per_second is None:
        reason = record.message.splitlines()[0][:100] if record.message else ""
        return record.status.replace("_", " ") + (f" ({reason})" if reason else "")
    rate = rate_text(record) + expected_text(record)
    return ", ".join(filter(None, (rate, memory_text(record))))


def expected_text(record: MeasurementRecord) -> str:
    """The rate that the search expected, once probes had taught it something; else "": a guess
    before any of them says nothing of the search."""
    expected = record.expected
    if expected is None or expected.basis != "probes" or expected.images_per_second is None:
        return ""
    return f" (expected {expected.images_per_second[1]:.4g})"
