"""A search as it goes on, one line at a time: of steps and of loaders alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planner.units import format_seconds

if TYPE_CHECKING:
    from search.kinds import ProbeRecord
    from search.progress import Progress


def progress_line(
    progress: Progress[Any, Any], title: Callable[[Any], str], found: Callable[[Any], str]
) -> str:
    """Phase, probe n of N, the setting, what it found, the best so far, time left. `title` names a
    setting, `found` says what a probe that was measured found."""
    if progress.kind == "note":
        return progress.text
    if progress.kind not in ("start", "end") or progress.candidate is None:
        return ""
    of = f" of {progress.num_probes}" if progress.num_probes else ""
    setting = title(progress.candidate.setting)
    parts = [f"[{progress.phase}] probe {progress.probe}{of}: {setting}"]
    if progress.record is not None:
        parts.append(_outcome(progress.record, found))
    if progress.best_rate:
        parts.append(f"best {progress.best_rate:.4g} images/s")
    if progress.seconds_left is not None:
        parts.append(f"{format_seconds(progress.seconds_left)} left")
    return " · ".join(parts)


def _outcome(record: ProbeRecord, found: Callable[[Any], str]) -> str:
    """What a probe found, or how it ended instead."""
    if record.status != "measured" or record.images_per_second is None:
        reason = record.message.splitlines()[0][:100] if record.message else ""
        return record.status.replace("_", " ") + (f" ({reason})" if reason else "")
    return found(record)
