"""The folder of results, its recommendation, and who is at it or at a GPU: two at once are in each
other's way."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from planner.core.errors import PlannerError, UsageError, shorten
from planner.core.files import write_whole


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


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Takes the lock of a folder of results while the context lasts. Raises UsageError where
    another tuner is at it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not _take(descriptor):
            raise UsageError(
                f"another tuner is at {folder}.",
                "Choose another --output; tuners that share a study have one --storage.",
            )
        yield
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


def make_folder(path: Path) -> Path:
    """The folder for results, made where it is not there. Raises UsageError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a path that holds a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"--output {shorten(str(path))} cannot be made a folder: {reason}.",
            "Choose another --output.",
        ) from None
    return path


class ResultNotWrittenError(PlannerError):
    """`recommendation` was found, and its file cannot be written."""

    def __init__(self, message: str, way_out: str, recommendation: BaseModel) -> None:
        super().__init__(message, way_out)
        self.recommendation: Any = recommendation


def write_result(path: Path, recommendation: BaseModel, probes: Path | None = None) -> None:
    """Raises ResultNotWrittenError; `probes` is where what it is made of is kept."""
    free = f"The probes are in {probes}: free" if probes else "Free"
    try:
        write_whole(path, recommendation.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ResultNotWrittenError(
            f"{path} cannot be written: {error.strerror}.",
            f"{free} space and run the same command, or choose another --output.",
            recommendation,
        ) from error
