"""The folder of results, its recommendation, and who is at it or at a GPU: two at once are in each
other's way."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from planner.core.errors import PlannerError, UsageError, shorten
from planner.core.files import write_whole


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Takes the lock of a folder of results while the context lasts. Raises UsageError where
    another tuner is at it."""
    with _lock(folder) as is_ours:
        if not is_ours:
            raise UsageError(
                f"another tuner is at {folder}.",
                "Choose another --output; tuners that share a study have one --storage.",
            )
        yield


def hold_gpu(uuid: str) -> AbstractContextManager[bool]:
    """Takes the lock of a GPU while the context lasts: one file for all users of the machine, so
    opened for reading only, and not made where it is. False where another tuner has it."""
    name = re.sub(r"[^A-Za-z0-9-]+", "_", uuid)[:80]  # a UUID is a driver's word, and no path
    path = Path(tempfile.gettempdir()) / f"planner-{name}.lock"
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o644))
    return _lock(path)


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """False where another has it, true also where nobody can tell. The kernel gives the lock back
    when its holder ends, however that comes."""
    with contextlib.ExitStack() as stack:
        is_ours = True
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_ours = False
        except OSError:
            pass  # a file system without locks, or a file that is another's
        yield is_ours


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
