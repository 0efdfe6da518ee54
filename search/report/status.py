"""Where a search stands at a moment: what its live table shows. Events in, a status out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.core.units import format_seconds
from search.loop.progress_text import (
    memory_text,
    rate_text,
    setting_title,
    status_text,
    was_measured,
)

if TYPE_CHECKING:
    from search.loop.progress import Progress

NUM_ENDED = 6  # of the probes that have ended, the last so many are kept to be shown
# What a worker reports of itself, for a person: search.probe.parent.runner.ProbeEvent and
# search.loader.probing.probe_loader say when.
_DOING = {
    "start": "starting", "import": "importing libraries", "device": "taking the device",
    "build": "building the model", "compile": "compiling", "forward": "first forward pass",
    "backward": "first backward pass", "optimizer": "first optimizer step", "warm-up": "warming up",
    "measure": "timing steps", "check": "checking", "end": "ending", "open": "opening the data",
    "warm": "reading the pictures once", "stages": "timing the stages of loading",
    "join": "waiting for the other ranks", "profile": "running under the profiler",
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """A probe that has ended: `found` is its rate, or how it ended in place of one."""

    number: int
    title: str
    found: str
    memory: str = ""
    is_good: bool = True


@dataclass(frozen=True)
class Status:
    """Instants (`_at`) are those of one clock, in seconds; None where there is none.

    `heading` is the command, `noun` what is counted: probe, row. `title` is what runs now, `phase`
    why, `doing` what its worker is at. `num_done` have ended, of `num_all` (None: no limit).
    """

    heading: str = ""
    noun: str = "probe"
    way_out: str = ""
    title: str = ""
    phase: str = ""
    doing: str = ""
    number: int = 0
    begun_at: float | None = None
    deadline_seconds: float | None = None
    best: Ended | None = None
    num_done: int = 0
    num_all: int | None = None
    ends_at: float | None = None
    ended: tuple[Ended, ...] = ()

    def noted(self, text: str) -> Status:
        """A note came, which says what goes on where nothing runs."""
        return self if self.title else replace(self, doing=text.splitlines()[0] if text else "")

    def begun(
        self, title: str, number: int, now: float, deadline_seconds: float | None = None,
        phase: str = "",
    ) -> Status:  # fmt: skip
        return replace(
            self, title=title, phase=phase, number=number, begun_at=now, doing=_DOING["start"],
            deadline_seconds=deadline_seconds,
        )  # fmt: skip

    def stepped(self, phase: str, num_steps: int = 0, step_seconds: float | None = None) -> Status:
        """What runs has come to `phase`; `num_steps` of it took `step_seconds` each."""
        return replace(self, doing=doing_text(phase, num_steps, step_seconds))

    def finished(self, ended: Ended, best: Ended | None = None) -> Status:
        return replace(
            self, title="", phase="", doing="", begun_at=None, deadline_seconds=None, best=best,
            num_done=ended.number, ended=(*self.ended, ended)[-NUM_ENDED:],
        )  # fmt: skip

    def limited(self, num_all: int | None, seconds_left: float | None, now: float) -> Status:
        """How many there may be in all, and how long it may go on."""
        ends_at = None if seconds_left is None else now + seconds_left
        return replace(self, num_all=num_all, ends_at=ends_at)


def doing_text(phase: str, num_steps: int = 0, step_seconds: float | None = None) -> str:
    """What a worker is at: `timing steps: 12 so far, 101 ms each`."""
    doing = _DOING.get(phase, phase)
    if step_seconds is None:
        return doing
    return f"{doing}: {num_steps} so far, {format_seconds(step_seconds)} each"


def after(status: Status, progress: Progress, now: float) -> Status:
    """Where a search stands once `progress` came at `now`."""
    if progress.kind == "note":
        return status.noted(progress.text)
    if progress.kind == "step":
        return status.stepped(
            progress.phase or progress.text, progress.num_steps, progress.step_seconds
        )
    assert progress.candidate is not None, "a probe is of one"
    title = setting_title(progress.candidate.setting)
    status = status.limited(progress.num_probes, progress.seconds_left, now)
    if progress.record is None:
        return status.begun(title, progress.probe, now, progress.deadline_seconds, progress.phase)
    return status.finished(
        ended_probe(progress.probe, title, progress.record),
        None if progress.best is None else _best(progress.best),
    )


def ended_probe(number: int, title: str, record: Any) -> Ended:
    """A probe's record as a line of the table."""
    if not was_measured(record):
        return Ended(number, title, status_text(record), is_good=False)
    return Ended(number, title, rate_text(record), memory_text(record))


def _best(record: Any) -> Ended:
    return ended_probe(0, setting_title(record.setting), record)
