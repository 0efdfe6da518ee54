"""The folder of results and its recommendation. One tuner at a time is at it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from planner.core.errors import PlannerError, UsageError, shorten
from planner.core.files import write_whole


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Takes the lock of a folder of results while the context lasts. Raises UsageError where
    another tuner is at it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another tuner is at {folder}.",
                "Choose another --output; tuners that share a study have one --storage.",
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


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
