"""Workers that need not import torch again: forked from a process that has, and has done no more.

A fresh process spends seconds on imports before it trains. This server pays them once. Its children
are as good as fresh ones: it never runs an operation, creates no CUDA context (which would not
survive a fork) and starts no thread of torch's; each child serves one probe and ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from pydantic import TypeAdapter

from planner.core.schema import Model, NamedModel, SwinConfig, TrainSetting
from planner.machine import supervisor
from search.probe.parent.environment import probe_environment
from search.probe.worker import worker

# What every eager probe imports; the first optimizer of a process would import torch._dynamo.
STEP_MODULES = ("search.probe.worker.measure", "torch._dynamo")
# Of ranks too: FSDP's part of torch takes a second more.
WORLD_MODULES = (*STEP_MODULES, "torch.distributed.fsdp")
# lifeline, status, request, result, standard error
_NUM_FDS = 5


class ForkServerGoneError(Exception):
    """The fork server has ended, or is not fit to be forked: let workers start by themselves."""


class ForkServer:
    """A process with torch imported, from which workers are forked; a context manager.

    It imports `modules`, the first of which must be available, and the library of `model` (a
    factory of the user's is not imported: it is run in the worker alone). The server ends when it
    is closed and when this process ends, however that comes. Its workers have the environment and
    the current directory of the moment it was made.
    """

    def __init__(self, model: Model | None = None, modules: Sequence[str] = STEP_MODULES) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._lock = threading.Lock()
        self._ready = False
        environment = probe_environment()
        # torch.cuda.is_available() then asks NVML, where it would else initialise CUDA.
        environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        config = model.model_dump_json() if isinstance(model, SwinConfig | NamedModel) else ""
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    __name__,
                    str(theirs.fileno()),
                    config,
                    str(os.getpid()),
                    ",".join(modules),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def spawn(self, fds: Sequence[int], deadline: float) -> Callable[[], object]:
        """Fork supervisor and worker with `fds`: lifeline, status, request, result, error.

        Waits for the imports the first time, until `deadline` (an instant of `time.monotonic`).
        Returns what to call when the supervisor has ended: nothing is to be done, the server has
        reaped it. Raises ForkServerGoneError.
        """
        with self._lock:
            try:
                self._await_readiness(deadline)
                socket.send_fds(self._socket, [b"fork"], list(fds))
            except (OSError, EOFError) as error:
                raise ForkServerGoneError from error
        return lambda: None

    def _await_readiness(self, deadline: float) -> None:
        if self._ready:
            return
        self._socket.settimeout(max(0.0, deadline - time.monotonic()))
        if self._socket.recv(64) != b"ready":
            raise EOFError
        self._socket.settimeout(None)
        self._ready = True

    def close(self) -> None:
        """End the server. Workers that are still at work have supervisors of their own."""
        self._socket.close()
        try:
            self._process.wait(1 if self._ready else 0)
        except subprocess.TimeoutExpired:  # still importing: it does not listen yet
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Import, say so, and fork a supervisor for each set of channels until the parent is gone."""
    # While it imports it does not listen: the kernel ends it then, with its parent.
    supervisor.set_process_option(supervisor.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[3]):  # it died before the line above took effect
        return
    _import_modules(sys.argv[4].split(","))
    if sys.argv[2]:
        _import_library(sys.argv[2])
    if importlib.import_module("torch").cuda.is_initialized():
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps the supervisors
    supervisor.set_process_option(supervisor.PR_SET_PDEATHSIG, 0)
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        parent.send(b"ready")
        while True:
            message, fds, _, _ = socket.recv_fds(parent, 16, _NUM_FDS)
            if not message:
                return
            if os.fork() == 0:
                parent.close()
                _become_supervisor(fds)
            for fd in fds:
                os.close(fd)


def _import_modules(modules: Sequence[str]) -> None:
    """The first must be available; a library that cannot be imported is the worker's to report."""
    importlib.import_module(modules[0])
    for module in modules[1:]:
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def _import_library(written: str) -> None:
    """Import what building the model imports, by building it without data: no kernel runs.

    A library that is missing, or that cannot be built so, is the worker's to report.
    """
    from planner.libraries.building import build_for

    model = TypeAdapter[Model](Model).validate_json(written)
    torch = importlib.import_module("torch")
    with contextlib.suppress(Exception), torch.device("meta"):
        build_for(model, TrainSetting())()


def _become_supervisor(fds: Sequence[int]) -> NoReturn:
    os.setsid()
    lifeline, status, request, result, error = fds
    os.dup2(error, 2)
    os.close(error)
    supervisor.supervise(lambda: worker.work(request, result), lifeline, status)


if __name__ == "__main__":
    main()
