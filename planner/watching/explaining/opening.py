"""What is to be explained, opened once: a pipe can be read only once."""

from __future__ import annotations

import gzip
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, cast

from planner.core.errors import UsageError

STANDARD_INPUT = "-"
_HEAD_BYTES = 65_536  # the first line of a watch.jsonl has the plan in it
_GZIP = b"\x1f\x8b"
_WAIT_SECONDS = 5.0  # for somebody who writes into a named pipe


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, or standard input. Raises UsageError for a pipe that nobody writes to, OSError."""
    if str(path) == STANDARD_INPUT:
        if sys.stdin is None:
            raise UsageError("standard input is closed.", "Name a file, or pipe a log into it.")
        yield sys.stdin.buffer
    elif is_pipe(path):
        with open(_writer_awaited(path), "rb") as file:
            yield file
    else:
        with path.open("rb") as file:
            yield file


def is_pipe(path: Path) -> bool:
    """Whether it is read until whoever writes it ends: standard input, or a named pipe."""
    if str(path) == STANDARD_INPUT:
        return True
    return hasattr(os, "mkfifo") and path.exists() and stat.S_ISFIFO(path.stat().st_mode)


def _writer_awaited(path: Path) -> int:
    """A descriptor of a named pipe. To open one waits for a writer, without end."""
    opened: list[int] = []
    waiting = Thread(target=lambda: opened.append(os.open(path, os.O_RDONLY)), daemon=True)
    waiting.start()
    waiting.join(_WAIT_SECONDS)
    if not opened:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # lets the thread go
        raise UsageError(
            f"{path} is a pipe, and nobody has opened it to write for {_WAIT_SECONDS:.0f} s.",
            "Start the writer first, or pipe it: cat train.log | planner explain -",
        )
    return opened[0]


class _Whole(io.RawIOBase):
    """A stream of which `head` was read already, from its beginning again."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        data = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(data) :]
        buffer[: len(data)] = data
        return len(data)


def from_the_beginning(file: IO[bytes]) -> tuple[bytes, IO[bytes]]:
    """Its first bytes, and all of it; both unpacked where it is gzipped."""
    head = file.read(_HEAD_BYTES)
    whole = cast("IO[bytes]", io.BufferedReader(_Whole(head, file)))
    if head.startswith(_GZIP):
        return from_the_beginning(cast("IO[bytes]", gzip.GzipFile(fileobj=whole)))
    return head, whole
