"""Which processes a test has started, and which of them are left."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from planner.machine.supervisor import descendants
from search.probe.parent.fork_server import ForkServer

VARIABLE = "PLANNER_TEST_PROCESSES"
# Longer than the kernel takes to end a killed process on a busy machine.
_PATIENCE_SECONDS = 60.0


@contextmanager
def marked() -> Iterator[str]:
    """Every process started inside carries the token that this gives, whatever it then becomes."""
    token = uuid.uuid4().hex
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = token
    try:
        yield token
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def carrying(token: str) -> set[int]:
    """The pids of all living processes that carry `token`; zombies of ours count as living."""
    zombies = {pid for pid in descendants(os.getpid()) if not _environment(pid)}
    found = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    return {pid for pid in found if token.encode() in _environment(pid)} | zombies


def remaining(token: str, besides: Set[int] = frozenset()) -> set[int]:
    """As `carrying`, once none but `besides` is left or patience is at its end."""
    patience = time.monotonic() + _PATIENCE_SECONDS
    while (left := carrying(token) - besides) and time.monotonic() < patience:
        time.sleep(0.05)
    return left


@contextmanager
def nothing_more_remains(token: str, servers: Iterable[ForkServer] = ()) -> Iterator[None]:
    """What other tests have left running, a pool of Inductor's say, is no fault of this one's, nor
    are `servers`, that tests share."""
    before = carrying(token) | {server.pid for server in servers}
    yield
    left = remaining(token, before)
    assert not left, {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left}


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
