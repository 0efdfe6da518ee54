"""A launch line of several ranks, followed with a deadline; nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

from planner.machine.supervisor import descendants

SECONDS = 240.0  # a launcher and two ranks import torch, on a busy machine


def follow(
    command: list[str], folder: Path, environment: dict[str, str], seconds: float = SECONDS
) -> tuple[int, str]:
    """(the exit code, everything that was printed) of `command`, run in `folder`.

    Past the deadline, or if the test itself is stopped, every process below it ends: torchrun's
    ranks lead sessions of their own, so they are found by their parents.
    """
    started = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        said = (late.output or b"").decode(errors="replace")
        raise AssertionError(
            f"{command} has not ended after {seconds} s:\n{said[-4000:]}"
        ) from None
    finally:
        for process in reversed((started.pid, *descendants(started.pid))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        started.wait()
    return started.returncode, output


def free_port() -> int:
    """One that nobody listened on a moment ago."""
    with socket.create_server(("localhost", 0)) as found:
        return int(found.getsockname()[1])
