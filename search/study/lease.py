"""The right to probe a setting: who holds it, and whether the holder has died."""

from __future__ import annotations

import json
import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from search.kinds import SettingT
from search.space import Candidate


@dataclass(frozen=True)
class Lease(Generic[SettingT]):
    """The right to probe a candidate until the lease ends."""

    candidate: Candidate[SettingT]
    probe_id: str
    trial_number: int


def holder_name() -> str:
    """A study in this process, told apart from any other, before it or after: host, boot, pid and
    its start, and a name of its own."""
    process = socket.gethostname(), _boot_id(), os.getpid(), _started(os.getpid())
    return json.dumps([*process, uuid.uuid4().hex])


def is_dead(holder: str) -> bool:
    """Whether a holder is surely gone. One on another machine may live: its lease decides."""
    try:
        host, boot, pid, started, *_ = json.loads(holder)
    except (ValueError, TypeError):
        return False
    if host != socket.gethostname():
        return False
    return bool(boot != _boot_id() or _started(int(pid)) != started)


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _started(pid: int) -> str | None:
    """When a process began, in clock ticks since boot; None where there is none of that id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]
