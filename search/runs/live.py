"""Where a search stands at a moment, and the panel that shows it, for rich to draw. Probes that
have ended are lines above it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from planner.core.errors import printable
from planner.core.units import format_seconds
from planner.report.settings import describe_setting
from search.loop.progress import Progress, memory_text, rate_text

_ECHO = 4  # columns for the ^C that a terminal echoes: where it wraps, rich erases a row too few
# What a worker reports of itself, for a person: search.probe.parent.runner.ProbeEvent says when.
_DOING = {
    "start": "starting", "import": "importing libraries", "device": "taking the device",
    "build": "building the model", "compile": "compiling", "forward": "first forward pass",
    "backward": "first backward pass", "optimizer": "first optimizer step", "warm-up": "warming up",
    "measure": "timing steps", "check": "checking", "end": "ending",
    "join": "waiting for the other ranks", "profile": "running under the profiler",
}  # fmt: skip


@dataclass(frozen=True)
class Status:
    """Instants (`_at`) are those of one clock, in seconds; None where there is none. `heading` is
    the command. `title` is what runs now, `phase` why, `doing` what its worker is at. `num_done`
    have ended, of `num_all` (None: no limit)."""

    heading: str = ""
    way_out: str = ""
    title: str = ""
    phase: str = ""
    doing: str = ""
    number: int = 0
    begun_at: float | None = None
    deadline_seconds: float | None = None
    best: str = ""
    num_done: int = 0
    num_all: int | None = None
    ends_at: float | None = None


def after(status: Status, progress: Progress, now: float) -> Status:
    """Where a search stands once `progress` came at `now`."""
    if progress.kind == "note":  # it says what goes on where nothing runs
        return status if status.title else replace(status, doing=progress.text.partition("\n")[0])
    if progress.kind == "step":
        phase = progress.phase or progress.text
        return replace(status, doing=doing_text(phase, progress.num_steps, progress.step_seconds))
    assert progress.candidate is not None, "a probe is of one"
    left = progress.seconds_left
    status = replace(
        status, title="", phase="", doing="", begun_at=None, deadline_seconds=None,
        num_all=progress.num_probes, ends_at=None if left is None else now + left,
    )  # fmt: skip
    if progress.record is None:
        return replace(
            status, title=describe_setting(progress.candidate.setting), phase=progress.phase,
            number=progress.probe, begun_at=now, doing=_DOING["start"],
            deadline_seconds=progress.deadline_seconds,
        )  # fmt: skip
    best = progress.best
    said = best and f"{rate_text(best)}, {memory_text(best)}: {describe_setting(best.setting)}"
    return replace(status, num_done=progress.probe, best=said or "")


def doing_text(phase: str, num_steps: int = 0, step_seconds: float | None = None) -> str:
    """What a worker is at: `timing steps: 12 so far, 101 ms each`."""
    doing = _DOING.get(phase, phase)
    if step_seconds is None:
        return doing
    return f"{doing}: {num_steps} so far, {format_seconds(step_seconds)} each"


def live_panel(status: Status, now: float, width: int) -> Panel:
    """What runs, what it is at, the best so far and how far all of it is: a line each, always."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True)
    grid.add_row("now", _text(_now(status), "bold"))
    grid.add_row("", _text(_doing(status, now)))
    grid.add_row("best", _text(status.best or "nothing yet", "green" if status.best else "dim"))
    grid.add_row("done", _text(_done(status, now)))
    return Panel(
        grid, title=_text(status.heading, "bold"), title_align="left",
        subtitle=_text(status.way_out, "dim"), subtitle_align="left", border_style="dim",
        width=width - _ECHO,
    )  # fmt: skip


def _now(status: Status) -> str:
    if not status.title:
        return "choosing the next probe" if status.num_done else "preparing"
    of = f" of {status.num_all}" if status.num_all else ""
    phase = f" [{status.phase}]" if status.phase else ""
    return f"probe {status.number}{of}{phase}: {status.title}"


def _doing(status: Status, now: float) -> str:
    parts = [status.doing] if status.doing else []
    if status.begun_at is not None:
        elapsed, limit = _whole_seconds(now - status.begun_at), status.deadline_seconds
        parts.append(elapsed if limit is None else f"{elapsed} of {_whole_seconds(limit)} at most")
    return " · ".join(parts)


def _done(status: Status, now: float) -> str:
    of = f" of {status.num_all}" if status.num_all else ""
    parts = [f"{status.num_done}{of} probe{'' if status.num_done == 1 and not of else 's'}"]
    if status.ends_at is not None:
        parts.append(f"{_whole_seconds(status.ends_at - now)} left")
    return " · ".join(parts)


def _whole_seconds(seconds: float) -> str:
    """Without the decimals that format_seconds has: a clock that ticks."""
    whole = int(max(seconds, 0.0))
    return f"{whole} s" if whole < 60 else format_seconds(whole)


def _text(text: str, style: str = "") -> Text:
    """On one line and as it is: never markup, its control characters escaped."""
    return Text(printable(" ".join(text.split())), style=style)
