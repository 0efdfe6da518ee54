"""A launch line of several ranks, followed with a deadline; nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from planner.machine.supervisor import descendants

SECONDS = 240.0  # a launcher and two ranks import torch, on a busy machine


class StoodStillError(AssertionError):
    """A launch line had not ended by its deadline; the message says where its processes stood."""


def follow(
    command: list[str], folder: Path, environment: dict[str, str], seconds: float = SECONDS
) -> tuple[int, str]:
    """(the exit code, everything that was printed) of `command`, run in `folder`.

    It ends with its launcher, whoever holds its output still. Past the deadline, or if the test
    itself is stopped, every process below it ends: torchrun's ranks lead sessions of their own, so
    they are found by their parents.
    """
    with tempfile.TemporaryFile() as output:
        started = subprocess.Popen(
            command, cwd=folder, env=environment, start_new_session=True,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        below: set[int] = set()
        try:
            started.wait(seconds)
        except subprocess.TimeoutExpired:
            below.update(descendants(started.pid))
            _signal(below, signal.SIGUSR1)  # faulthandler's, where a script registered it
            time.sleep(2)
            said = f"{command} has not ended after {seconds} s:\n{_printed(output)[-8000:]}"
            raise StoodStillError(said) from None
        finally:
            _signal((*below, *descendants(started.pid), started.pid), signal.SIGKILL)
            started.wait()
        return started.returncode, _printed(output)


def _printed(output: IO[bytes]) -> str:
    """So far: read without moving where its writers are."""
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), size, 0).decode(errors="replace")


def _signal(processes: Iterable[int], what: signal.Signals) -> None:
    for process in sorted(processes, reverse=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, what)


def free_port() -> int:
    """One that nobody listened on a moment ago."""
    with socket.create_server(("localhost", 0)) as found:
        return int(found.getsockname()[1])
