"""`watch.jsonl`: one JSON object a line, appended whole, bounded, one file for each rank.

Lines are of four kinds: `start`, `interval`, `event` and `end`. A file may hold several runs.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from planner.core.units import MIB

LOG_FORMAT = 1
LOG_FILE = "watch.jsonl"
# A line of an interval is some 500 bytes: at one each 30 s that is five days.
MAX_LOG_BYTES = 8 * MIB
# What is left for events and the end, once intervals have filled the file.
_RESERVE_BYTES = MIB // 4


def log_path(folder: Path, rank: int) -> Path:
    """`watch.jsonl` of rank 0, `watch.rank3.jsonl` of rank 3: no two processes write one file."""
    return folder / (LOG_FILE if rank == 0 else f"watch.rank{rank}.jsonl")


class LogFile:
    """Appends lines to a file that it keeps open. Raises OSError where a line cannot be written;
    the next one then begins on a line of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._size = 0
        self._is_torn = False

    def write(self, line: dict[str, Any]) -> bool:
        """Whether there was room for it: intervals leave some for events, and these for the end."""
        data = (encode(line) + "\n").encode()
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        left = {"interval": _RESERVE_BYTES, "event": _RESERVE_BYTES // 2}.get(line["kind"], 0)
        if self._size + len(data) > MAX_LOG_BYTES - left:
            return False
        if self._is_torn:
            data = b"\n" + data
        written = 0
        try:
            written = os.write(self._descriptor, data)
        finally:
            self._is_torn = written != len(data)
            self._size += written
        if self._is_torn:
            raise OSError(f"only {written} of {len(data)} bytes were written to {self.path}")
        return True

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        flags |= os.O_NONBLOCK  # a pipe that nobody reads is an error, and is not waited for
        self._descriptor = os.open(self.path, flags, 0o666)
        self._size = os.fstat(self._descriptor).st_size
        self._is_torn = self._size > 0 and not self._ends_with_newline()

    def _ends_with_newline(self) -> bool:
        """Whether whoever wrote before came to the end of a line."""
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def encode(line: dict[str, Any]) -> str:
    """A line as strict JSON: infinities and NaN as text, what JSON does not know as its own text,
    and figures with no more digits than they deserve."""
    return json.dumps(_plain(line), ensure_ascii=True, separators=(",", ":"), default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value
