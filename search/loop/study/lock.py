"""Who tunes on a GPU: two at once measure each other."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold_gpu(uuid: str | None) -> Iterator[bool]:
    """Takes the lock of the GPU with this UUID while the context lasts; false where another tuner
    of this machine has it.

    True also where nobody can tell: no UUID, or no file in the temporary directory. The kernel
    gives the lock back when its holder ends, however that comes.
    """
    descriptor = _open(_path(uuid)) if uuid else None
    if descriptor is None:
        yield True
        return
    try:
        yield _take(descriptor)
    finally:
        os.close(descriptor)


def _path(uuid: str) -> Path:
    """One file for all users of the machine; a UUID is a driver's word, and no path."""
    name = re.sub(r"[^A-Za-z0-9-]+", "_", uuid)[:80]
    return Path(tempfile.gettempdir()) / f"planner-{name}.lock"


def _open(path: Path) -> int | None:
    """For reading only, and made only where there is none: the file may be another user's."""
    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CREAT | os.O_EXCL, os.O_RDONLY):
        try:
            return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError:
            continue
    return None


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
