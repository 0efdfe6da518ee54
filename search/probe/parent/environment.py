"""What a probe's processes find in their environment, beside what this one has."""

from __future__ import annotations

import math
import os

from planner.core.units import MIB
from planner.machine.host import read_host
from search.probe.device import memory_in_use, worker_environment

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
# Rounds in which a thread of GNU's OpenMP waits for the others before it sleeps: a few tenths of a
# millisecond in place of several (300,000, libgomp's manual), in which it keeps the processor from
# the very thread it waits for where other programs run too. Measured: a step of one image of Swin-T
# took 20 to 43 s on two cores with eight busy programs, and 5 s with this (torch 2.13, 2026-11-26).
# More than torch takes between two kernels, so that threads of a quiet machine should not sleep: a
# judgement.
SPINS, SPIN_ROUNDS = "GOMP_SPINCOUNT", 10_000
_WAIT_POLICY = "OMP_WAIT_POLICY"
# As many as torch would have at most (2.9 to 2.13: torch/_inductor/config.py).
_MAX_THREADS = 32
# The host memory of one compile worker (torch, Triton, LLVM): an assumption.
_WORKER_BYTES = 512 * MIB
# Of the memory that is free they get this part; the probe itself and the tuner live on the rest.
_WORKERS_PART = 2


def probe_environment() -> dict[str, str]:
    """The environment of a worker, or of the fork_server it is forked from.

    torch starts a compile worker for every core it may run on, and sees neither a container's share
    of the cores nor its memory, for want of which the kernel may end the tuner. Who has set their
    number keeps it, and so does who has said how threads wait.
    """
    environment = worker_environment()
    if _WAIT_POLICY not in environment:
        environment.setdefault(SPINS, str(SPIN_ROUNDS))
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
    return math.ceil(read_host().cpus)


def rank_threads(num_ranks: int) -> int:
    """Threads of the CPU for each of several ranks, so that they do not fight for the cores: those
    that OMP_NUM_THREADS names, else an equal share, one at least."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    return max(1, usable_cores() // num_ranks)
