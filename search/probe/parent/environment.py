"""What a probe's processes find in their environment, beside what this one has."""

from __future__ import annotations

import math
import os
from pathlib import Path

from planner.units import MIB
from search.probe.device import memory_in_use, worker_environment

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
# As many as torch would have at most (2.9 to 2.13: torch/_inductor/config.py).
_MAX_THREADS = 32
# The host memory of one compile worker (torch, Triton, LLVM): an assumption.
_WORKER_BYTES = 512 * MIB
# Of the memory that is free they get this part; the probe itself and the tuner live on the rest.
_WORKERS_PART = 2
_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def probe_environment() -> dict[str, str]:
    """The environment of a worker, or of the fork_server it is forked from.

    torch starts a compile worker for every core it may run on, and sees neither a container's share
    of the cores nor its memory, for want of which the kernel may end the tuner. Who has set their
    number keeps it.
    """
    environment = worker_environment()
    if THREADS not in environment:
        environment[THREADS] = str(compile_threads())
    return environment


def compile_threads() -> int:
    """As many compile workers as there are cores and memory for, one at least."""
    cores = usable_cores()
    memory = memory_in_use("cpu")
    room = memory.free_bytes // _WORKERS_PART // _WORKER_BYTES if memory is not None else cores
    return max(1, min(_MAX_THREADS, cores, room))


def usable_cores() -> int:
    """The cores that this process may run on, or have the time of."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cores if quota is None else min(cores, math.ceil(quota))


def rank_threads(num_ranks: int) -> int:
    """Threads of the CPU for each of several ranks, so that they do not fight for the cores: those
    that OMP_NUM_THREADS names, else an equal share, one at least."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    return max(1, usable_cores() // num_ranks)


def cpu_quota() -> float | None:
    """How many cores' time the control group may use; None where it is not limited.

    Version 2 has both numbers in `cpu.max`, version 1 in two files. In a container the path in
    /proc/self/cgroup may not exist, and the tree's root is ours.
    """
    found = []
    for line in _GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        names: tuple[str, ...]
        if controllers == "":
            root, names = _ROOT, ("cpu.max",)
        elif "cpu" in controllers.split(","):
            root, names = _ROOT / "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        else:
            continue
        for group in (root / path.lstrip("/"), root):
            found += _read_quota(group, names)
    return min(found, default=None)


def _read_quota(group: Path, names: tuple[str, ...]) -> list[float]:
    """[cores] of one group; [] where it does not exist or is not limited ("max", or -1)."""
    try:
        words = [word for name in names for word in (group / name).read_text().split()]
    except OSError:
        return []
    if len(words) != 2 or not all(word.isdigit() for word in words) or words[1] == "0":
        return []
    return [int(words[0]) / int(words[1])]
