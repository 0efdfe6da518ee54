"""Whether the machine was quiet while something was timed: what other programs took of it.

All that the kernel counts of the processors this process may run on, less what it used itself. A
control group that hides the machine's own counts hides other programs too. Linux only.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass

import psutil

from planner.machine.host import read_host

# Of the processors: an idle machine's services take a hundredth or two. A judgement.
_NOTEWORTHY_SHARE = 0.1
_LEAST_SECONDS = 0.2  # the kernel counts in hundredths of a second
_WAITING = ("idle", "iowait")
_COUNTED_TWICE = ("guest", "guest_nice")  # in user and nice already (proc(5), /proc/stat)


@dataclass(frozen=True)
class _Reading:
    at: float
    busy_seconds: float
    own_seconds: float


class QuietWatch:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self.before = _read()

    def flags(self, wanted: float = math.inf) -> list[str]:
        """One where others took processors that were `wanted` here (all); below a fifth of a second
        it cannot be told."""
        now, before = _read(), self.before
        seconds = now.at - before.at
        if seconds < _LEAST_SECONDS:
            return []
        all_busy = now.busy_seconds - before.busy_seconds
        others = (all_busy - (now.own_seconds - before.own_seconds)) / seconds
        host = read_host()
        room = host.usable_cpus - others
        if others < _NOTEWORTHY_SHARE * host.usable_cpus or room >= min(wanted, host.cpus):
            return []
        taken = min(others, host.usable_cpus)
        return [
            f"other programs kept {taken:.2g} of {host.usable_cpus} processors busy meanwhile "
            f"(load average {os.getloadavg()[0]:.3g})"
        ]


def _read() -> _Reading:
    counted = psutil.cpu_times(percpu=True)
    mine = [counted[n] for n in os.sched_getaffinity(0) if n < len(counted)]
    left_out = (*_WAITING, *_COUNTED_TWICE)
    busy = sum(
        seconds for cpu in mine for name, seconds in cpu._asdict().items() if name not in left_out
    )
    return _Reading(time.monotonic(), busy, time.process_time())
