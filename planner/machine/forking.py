"""Workers that are forked from a process which has imported torch, so that they need not.

A new process spends seconds on imports. The server spends them once, and its forks are as good as
new processes: it never runs an operation, creates no CUDA context (which would not survive a fork)
and starts no thread. This module itself imports no torch.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, Self
from unittest import mock

from planner.machine import supervisor

# The kernel gets so long to end killed processes before they are given up (a process in an
# uninterruptible call of a driver cannot be killed).
KILL_SECONDS = 15.0
_MESSAGE_BYTES = 1 << 20  # more than a socket holds (net.core.wmem_max)
_MAX_FDS = 253  # in one message: SCM_MAX_FD


class ForkServer:
    """A process that has imported `modules`, and forks workers; a context manager.

    It starts importing at once, in `environment`, and ends when it is closed or when this process
    ends for any reason. If it has ended, the next `fork` starts another. It and its workers print
    to the file descriptor `output`.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str],
        output: int = subprocess.DEVNULL,
    ) -> None:  # fmt: skip
        self.modules, self.environment, self.output = modules, environment, output
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", __name__, str(theirs.fileno()),
                 str(os.getpid()), *self.modules],
                stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.output,
                pass_fds=(theirs.fileno(),), start_new_session=True, env=dict(self.environment),
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(
        self, function: str, arguments: Sequence[str], errors: Sequence[int] = (),
        imports: Sequence[str] = (),
    ) -> Workers:  # fmt: skip
        """Forks a worker for each of `arguments`, which calls `function`, a MODULE:NAME, with the
        descriptor of their channel and its argument. `errors` are the descriptors of their standard
        errors; the server imports `imports` before, those that are installed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._lock, theirs, os.fdopen(os.memfd_create("call"), "wb") as call:
            call.write(json.dumps([function, *arguments]).encode())
            call.flush()
            message = json.dumps(list(imports)).encode()
            fds = [call.fileno(), theirs.fileno(), *errors]
            try:
                socket.send_fds(self._socket, [message], fds)
            except OSError:  # it has ended
                self.close()
                self._start()
                socket.send_fds(self._socket, [message], fds)
        return Workers(self, ours)

    def close(self) -> None:
        """Ends the server. Its workers go on, under supervisors of their own."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Workers:
    """The workers of one `fork`. Leaving the context ends them and all that they started."""

    def __init__(self, server: ForkServer, channel: socket.socket) -> None:
        self._server, self._channel = server, channel
        self._were_started = False
        self.are_gone = False  # for certain

    def hear(self, seconds: float | None = None) -> bytes | None:
        """The next message of a worker, or of their supervisor: `ended WAIT_STATUS NUMBER` comes
        after all messages of the worker with this number. b"" once all are gone; None where no
        message comes within so many seconds."""
        self._channel.settimeout(seconds)
        try:
            message = self._channel.recv(_MESSAGE_BYTES)
        except (TimeoutError, BlockingIOError):
            return None
        if message.startswith(b"started"):
            self._were_started = True
            return self.hear(seconds)
        self.are_gone |= not message
        return message

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        while self.hear(0.0):
            pass
        if not self._were_started:  # the server imports, or hangs: it would start them later
            self._server.close()
        limit = time.monotonic() + KILL_SECONDS
        while not self.are_gone and (left := limit - time.monotonic()) > 0:
            self.hear(left)
        self._channel.close()


def main() -> None:
    """The server, with the arguments SOCKET_FD PARENT_PID MODULE…: imports the modules, and forks a
    supervisor with its workers for each call, until the parent is gone."""
    own_socket, parent_pid, *modules = sys.argv[1:]
    # While it imports it does not listen: the kernel ends it then, with its parent.
    supervisor.set_process_option(supervisor.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent_pid):  # it died before the line above took effect
        return
    imported = set(modules)
    import_modules(modules)
    if len(modules) > 1 and not _is_fit():  # begin again, without the modules that asked for CUDA
        os.execv(sys.executable, sys.orig_argv[: 1 - len(modules)])
    supervisor.set_process_option(supervisor.PR_SET_PDEATHSIG, 0)
    with socket.socket(fileno=int(own_socket)) as parent:
        while True:
            message, fds, _, _ = socket.recv_fds(parent, _MESSAGE_BYTES, _MAX_FDS)
            if not message:
                return
            if missing := [name for name in json.loads(message) if name not in imported]:
                import_modules(missing)
                imported.update(missing)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps the supervisors
            if os.fork() == 0:
                parent.close()
                _become_supervisor(fds)
            for fd in fds:
                os.close(fd)


def import_modules(names: Sequence[str]) -> None:
    """Imports the modules that can be imported; a worker that needs another one reports that. Some
    libraries ask for a device as they are imported, which would initialise CUDA here: they see
    none."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # some modules start processes and wait for them
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao's registrations
    for name in names:
        with suppress(Exception), _no_gpu():
            importlib.import_module(name)
    if "torch._dynamo" in sys.modules:  # it may remember that there was no device
        interface: Any = importlib.import_module("torch._dynamo.device_interface")
        interface._device_initialized = False
        importlib.import_module("torch.utils._triton").has_triton.cache_clear()
    gc.collect()
    gc.freeze()  # modules are no garbage, and no fork need look through them


@contextmanager
def _no_gpu() -> Iterator[None]:
    """Within, torch sees no GPU, if it is imported already."""
    with ExitStack() as stack:
        if torch := sys.modules.get("torch"):
            for name, answer in (("is_available", False), ("device_count", 0)):
                stack.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        yield


def _is_fit() -> bool:
    """Whether a fork of this process can use CUDA: it cannot where this process has asked for
    it."""
    child = os.fork()
    if child == 0:
        torch = sys.modules.get("torch")
        os._exit(torch is not None and torch.cuda._is_in_bad_fork())
    return os.waitpid(child, 0)[1] == 0


def _become_supervisor(fds: Sequence[int]) -> NoReturn:
    call, channel, *errors = fds
    os.setsid()
    with os.fdopen(call) as file:
        file.seek(0)
        function, *arguments = json.load(file)

    def launch(number: int) -> None:
        if errors:
            os.dup2(errors[number], 2)
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(channel, arguments[number])

    workers = [partial(launch, number) for number in range(len(arguments))]
    supervisor.supervise(workers, channel, channel)


if __name__ == "__main__":
    main()
