"""A launch line of several ranks, followed with a deadline; nothing of it is left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from planner.machine.supervisor import descendants

SECONDS = 240.0  # a launcher and two ranks import torch, on a busy machine


def follow(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """(the exit code, everything that was printed) of `command`, run in `folder`.

    It ends with its launcher, whoever holds its output still. Past the deadline, or if the test
    itself is stopped, every process below it ends: torchrun's ranks lead sessions of their own, so
    they are found by their parents.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        started = subprocess.Popen(
            command, cwd=folder, env=environment, start_new_session=True,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            started.wait(SECONDS)
        finally:
            for process in sorted((*descendants(started.pid), started.pid), reverse=True):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            started.wait()
        output.seek(0)
        return started.returncode, output.read()


def free_port() -> int:
    """One that nobody listened on a moment ago."""
    with socket.create_server(("localhost", 0)) as found:
        return int(found.getsockname()[1])
