"""A command under a supervisor, heard on one channel and held to a deadline that may move."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from search.probe.failure import last_words
from search.probe.parent import supervisor

# How long the kernel may take to end killed processes before they are given up on.
_KILL_SECONDS = 15.0
_READ_BYTES = 1 << 16

Hear = Callable[[bytes], object]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its last words on standard output and error, whether it was late, and
    its wait status, in the kernel's encoding (None where the supervisor did not tell)."""

    words: str
    late: bool
    wait_status: int | None


def run_supervised(
    command: Sequence[str],
    hear: Hear,
    deadline: Callable[[], float],
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> Ended:
    """Run `command RESULT_FD ARGUMENTS…` until it ends; `hear` is given what it writes there.

    It and all that it started are ended at `deadline()` (an instant of `time.monotonic`, asked
    again after whatever was heard), when this is left by an exception, and when this process dies.
    """
    lifeline_theirs, lifeline = os.pipe()
    status, status_theirs = os.pipe()
    result, result_theirs = os.pipe()
    theirs = (lifeline_theirs, status_theirs, result_theirs)
    told = _Status()
    channels: dict[int, Hear] = {status: told.hear, result: hear}
    with tempfile.TemporaryFile() as output, contextlib.ExitStack() as stack:
        for fd in channels:
            stack.callback(os.close, fd)
        try:
            process = subprocess.Popen(
                [sys.executable, "-S", "-E", supervisor.__file__,
                 str(lifeline_theirs), str(status_theirs),
                 *command, str(result_theirs), *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=theirs,
                start_new_session=True, env=environment,
            )  # fmt: skip
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        try:
            ended = _listen(channels, deadline)
        finally:
            os.close(lifeline)  # the supervisor ends all that still runs
        if not ended:
            limit = time.monotonic() + _KILL_SECONDS
            _listen(channels, lambda: limit)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)
        output.seek(0)
        words = last_words(output.read().decode(errors="replace"))
    return Ended(words, not ended, told.wait_status)


class _Status:
    """The supervisor's lines: only the last one counts here, "ended WAIT_STATUS NUM"."""

    def __init__(self) -> None:
        self._data = b""

    def hear(self, data: bytes) -> None:
        self._data += data

    @property
    def wait_status(self) -> int | None:
        for line in self._data.decode(errors="replace").splitlines():
            word, *numbers = line.split()
            if word == "ended":
                return int(numbers[0])
        return None


def _listen(channels: Mapping[int, Hear], deadline: Callable[[], float]) -> bool:
    """Hear until every channel has ended; False where the deadline came first."""
    with selectors.DefaultSelector() as selector:
        for fd in channels:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline() - time.monotonic()
            if left <= 0:
                return False
            for key, _ in selector.select(left):
                data = os.read(key.fd, _READ_BYTES)
                if data:
                    channels[key.fd](data)
                else:
                    selector.unregister(key.fd)
    return True
