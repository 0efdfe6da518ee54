"""Where a search stands at a moment, and the panel that shows it, for rich to draw. Probes that
have ended are lines above it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from planner.core.errors import printable
from planner.core.units import format_seconds
from planner.report.searches import memory_text
from planner.report.settings import describe_setting
from search.loop.progress import Progress, rate_text

_ECHO = 4  # columns for the ^C that a terminal echoes: where it wraps, rich erases a row too few
# What a worker reports of itself, for a person: search.probe.parent.runner.ProbeEvent says when.
_DOING = {
    "start": "starting", "import": "importing libraries", "device": "taking the device",
    "build": "building the model", "compile": "compiling", "forward": "first forward pass",
    "backward": "first backward pass", "optimizer": "first optimizer step", "warm-up": "warming up",
    "measure": "timing steps", "check": "checking", "end": "ending",
    "join": "waiting for the other ranks",
}  # fmt: skip


@dataclass(frozen=True)
class Status:
    """`heading` is the command. `last` is the newest start or end of a probe, which came at the
    instant `at` of a clock in seconds, `doing` what its worker is at."""

    heading: str = ""
    way_out: str = ""
    last: Progress | None = None
    at: float = 0.0
    doing: str = ""

    @property
    def running(self) -> Progress | None:
        """The start of the probe that runs."""
        return self.last if self.last is not None and self.last.record is None else None


def after(status: Status, progress: Progress, now: float) -> Status:
    """Where a search stands once `progress` came at `now`."""
    if progress.kind == "note":  # it says what goes on where nothing runs
        return status if status.running else replace(status, doing=progress.text.split("\n")[0])
    if progress.kind == "step":
        doing = doing_text(progress.phase, progress.num_steps, progress.step_seconds)
        return replace(status, doing=doing)
    doing = _DOING["start"] if progress.kind == "start" else ""
    return replace(status, last=progress, at=now, doing=doing)


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
    best = _best(status)
    grid.add_row("best", _text(best or "nothing yet", "green" if best else "dim"))
    grid.add_row("done", _text(_done(status, now)))
    return Panel(
        grid, title=_text(status.heading, "bold"), title_align="left",
        subtitle=_text(status.way_out, "dim"), subtitle_align="left", border_style="dim",
        width=width - _ECHO,
    )  # fmt: skip


def _now(status: Status) -> str:
    probe = status.running
    if probe is None or probe.candidate is None:
        return "choosing the next probe" if status.last else "preparing"
    of = f" of {probe.num_probes}" if probe.num_probes else ""
    setting = describe_setting(probe.candidate.setting)
    return f"probe {probe.probe}{of} [{probe.phase}]: {setting}"


def _doing(status: Status, now: float) -> str:
    parts = [status.doing] if status.doing else []
    if status.running:
        elapsed, limit = _whole_seconds(now - status.at), status.running.deadline_seconds
        parts.append(elapsed if limit is None else f"{elapsed} of {_whole_seconds(limit)} at most")
    return " · ".join(parts)


def _best(status: Status) -> str:
    best = status.last.best if status.last else None
    if best is None:
        return ""
    return f"{rate_text(best)}, {memory_text(best)}: {describe_setting(best.setting)}"


def _done(status: Status, now: float) -> str:
    if status.last is None:
        return "0 probes"
    done, of = status.last.probe - bool(status.running), ""
    if status.last.num_probes:
        of = f" of {status.last.num_probes}"
    said = f"{done}{of} probe{'' if done == 1 and not of else 's'}"
    left = status.last.seconds_left
    return said if left is None else f"{said} · {_whole_seconds(status.at + left - now)} left"


def _whole_seconds(seconds: float) -> str:
    """Without the decimals that format_seconds has: a clock that ticks."""
    whole = int(max(seconds, 0.0))
    return f"{whole} s" if whole < 60 else format_seconds(whole)


def _text(text: str, style: str = "") -> Text:
    """On one line and as it is: never markup, its control characters escaped."""
    return Text(printable(" ".join(text.split())), style=style)
