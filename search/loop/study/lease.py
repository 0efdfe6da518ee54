"""The right to probe a setting: who holds it, and whether the holder has died."""

from __future__ import annotations

import json
import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

from search.loop.space import Candidate


@dataclass(frozen=True)
class Lease:
    """The right to probe a candidate until the lease ends."""

    candidate: Candidate
    probe_id: str
    trial_number: int


def holder_name() -> str:
    """A study in this process, told apart from any other, before it or after: host, where its pid
    holds, pid and its start, and a name of its own."""
    process = socket.gethostname(), _where_pids_hold(), os.getpid(), _started(os.getpid())
    return json.dumps([*process, uuid.uuid4().hex])


def is_dead(holder: str) -> bool:
    """Whether a holder is surely gone. One whose pid says nothing here may live: its lease decides.
    That is any other machine, also one of the same name (copies of one image have that), another
    container of this one, and this one before it was started again."""
    try:
        host, where, pid, started, *_ = json.loads(holder)
    except (ValueError, TypeError):
        return False
    if (host, where) != (socket.gethostname(), _where_pids_hold()):
        return False
    return bool(_started(int(pid)) != started)


def _where_pids_hold() -> str:
    """One start of one machine's kernel, and one of its namespaces of pids (a container's)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return ""
    return f"{boot} {namespace}"


def _started(pid: int) -> str | None:
    """When a process began, in clock ticks since boot; None where there is none of that id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]
