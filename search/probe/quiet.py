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
from search.probe.device import nvml_device
from search.probe.evidence import OTHERS_RAN

# Of the processors: an idle machine's services take a hundredth or two. A judgement.
_NOTEWORTHY_SHARE = 0.1
_LEAST_SECONDS = 0.2  # the kernel counts in hundredths of a second
_WAITING = ("idle", "iowait")
_COUNTED_TWICE = ("guest", "guest_nice")  # in user and nice already (proc(5), /proc/stat)
_NOTEWORTHY_PERCENT = 20  # of a GPU's time: a desktop takes some of it


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
        return [
            f"{OTHERS_RAN} {min(others, host.usable_cpus):.2g} of {host.usable_cpus} processors "
            f"busy meanwhile (load average {os.getloadavg()[0]:.3g})"
        ]


def gpu_flags(device: str) -> list[str]:
    """One where a GPU computes before anything of ours runs on it."""
    card = nvml_device(device) if device.startswith("cuda") else None
    used = card.utilization if card is not None else None
    if used is None or used.gpu_percent < _NOTEWORTHY_PERCENT:
        return []
    return [f"{OTHERS_RAN} {device} busy for {used.gpu_percent:g}% of the time before"]


def _read() -> _Reading:
    counted = psutil.cpu_times(percpu=True)
    mine = [counted[n] for n in os.sched_getaffinity(0) if n < len(counted)]
    left_out = (*_WAITING, *_COUNTED_TWICE)
    busy = sum(
        seconds for cpu in mine for name, seconds in cpu._asdict().items() if name not in left_out
    )
    return _Reading(time.monotonic(), busy, time.process_time())
