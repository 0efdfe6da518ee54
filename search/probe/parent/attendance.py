"""The tuner's side of any worker: spawn it, listen, hold it to the deadline, end it, judge its end.

What the worker does is not known here; imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, Literal

from pydantic import BaseModel

from search.probe import failure
from search.probe.parent import supervisor
from search.probe.parent.environment import probe_environment
from search.probe.parent.fork_server import ForkServer, ForkServerGoneError
from search.probe.protocol import A, AnswerReader, AnyOutcome, Order, PhaseMessage, encode
from search.probe.worker import worker

# How long a worker may take to end after its answer, or after it was asked to: it has nothing left
# to do but to be torn down by the driver.
EXIT_SECONDS = 3.0
# How long the kernel may take to end killed processes before they are given up on (a process in an
# uninterruptible call to a driver cannot be killed).
KILL_SECONDS = 15.0
# What is kept of each of the worker's output streams.
TAIL_BYTES = 16 * 1024
_READ_BYTES = 1 << 16
# A pipe holds 1 MiB at most (fs.pipe-max-size), unless root has said otherwise.
_PIPE_READS = (1 << 20) // _READ_BYTES


@dataclass(frozen=True)
class Silence:
    """Why a worker ended, or was ended, without an outcome."""

    status: Literal["timed_out", "out_of_memory", "crashed"]
    message: str


def judge_silence(
    listener: Listener[Any], deadline_seconds: float, kernel_kills: int | None
) -> Silence:
    """What is to be said of a worker without an outcome; `kernel_kills` were counted before it."""
    words = failure.last_words(listener.stderr.text())
    if listener.overdue:
        late = f"not done after {deadline_seconds:g} s, in {listener.phase}"
        return Silence("timed_out", late)
    if listener.wait_status is None:
        return Silence("crashed", "its supervisor was ended from outside")
    said = ""
    if listener.reader.num_garbage:
        said = f"; {listener.reader.num_garbage} unreadable messages and no answer"
    elif os.WIFEXITED(listener.wait_status) and os.WEXITSTATUS(listener.wait_status) == 0:
        said = " and no answer"
    return Silence(*failure.judge_death(listener.wait_status, words, kernel_kills, said))


class _Tail:
    """The last `TAIL_BYTES` of a stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data
        del self._bytes[:-TAIL_BYTES]

    def text(self) -> str:
        return self._bytes.decode(errors="replace")


class Listener(Generic[A]):
    """All that the parent hears of one worker, kept within bounds. `on_answer` hears what the
    worker says."""

    def __init__(self, reader: AnswerReader[A], on_answer: Callable[[A], None]) -> None:
        self.reader = reader
        self.on_answer = on_answer
        self.stdout, self.stderr = _Tail(), _Tail()
        self.phase = "start"
        self.overdue = False
        self.supervisor_pid: int | None = None
        self.supervisor_is_gone = False
        self.worker_pid: int | None = None
        self.wait_status: int | None = None
        self.flags: list[str] = []
        self._status = b""
        self.answered_at: float | None = None

    @property
    def all_flags(self) -> tuple[str, ...]:
        """What the parent has to add to a worker's answer."""
        garbage = self.reader.num_garbage
        told = [f"{garbage} unreadable messages on the result channel"] if garbage else []
        return (*self.flags, *told)

    def hear_answers(self, data: bytes) -> None:
        for answer in self.reader.feed(data):
            if isinstance(answer, AnyOutcome):
                self.answered_at = time.monotonic()
            elif isinstance(answer, PhaseMessage):
                self.phase = answer.phase
            self.on_answer(answer)

    def hear_supervisor(self, data: bytes) -> None:
        self._status += data
        *lines, self._status = self._status.split(b"\n")
        for line in lines:
            word, *numbers = line.decode().split()
            if word == "started":
                self.supervisor_pid, self.worker_pid = int(numbers[0]), int(numbers[1])
            else:
                self.wait_status = int(numbers[0])
                if int(numbers[1]):
                    self.flags.append(f"left {numbers[1]} processes behind, which were ended")


# Starts a supervisor and its worker on six channels: lifeline, status, request, result, output,
# error.
# Returns what to call when the supervisor has ended.
Spawn = Callable[[Sequence[int]], Callable[[], object]]


def choose_spawn(
    fork_server: ForkServer | None,
    deadline: float,
    command: Sequence[str] | None = None,
    module: ModuleType = worker,
) -> Spawn:
    """A worker of `module`: from the fork server where there is one; where it is gone, or with a
    command, by itself."""

    def spawn(fds: Sequence[int]) -> Callable[[], object]:
        if fork_server is not None and command is None:
            with contextlib.suppress(ForkServerGoneError):
                return fork_server.spawn(fds, deadline, module.__name__)
        return spawn_process(command or module.COMMAND, fds)

    return spawn


def spawn_process(command: Sequence[str], fds: Sequence[int]) -> Callable[[], object]:
    """Start a supervisor as a process of ours, and by it a worker: `command` with the descriptors
    of its two channels."""
    return supervise([*command, str(fds[2]), str(fds[3])], fds, probe_environment())


def supervise(
    command: Sequence[str], fds: Sequence[int], environment: Mapping[str, str]
) -> Callable[[], object]:
    """Start a supervisor as a process of ours, which starts `command` as it is."""
    lifeline, status, request, result, output, error = fds
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", supervisor.__file__, str(lifeline), str(status), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=error,
        pass_fds=(lifeline, status, request, result),
        start_new_session=True,
        env=environment,
    )
    return process.wait


@dataclass
class WorkerGroup:
    """A supervisor and what it watches. Leaving the context ends them all."""

    listener: Listener[Any]
    reap: Callable[[], object]
    lifeline: int
    request: int
    hearers: dict[int, Callable[[bytes], None]]
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    @classmethod
    @contextlib.contextmanager
    def start(cls, spawn: Spawn, listener: Listener[Any]) -> Iterator[WorkerGroup]:
        pipes = [os.pipe() for _ in range(6)]
        readers, writers = zip(*pipes, strict=True)
        lifeline, request = writers[0], writers[2]
        status, result, output, error = readers[1], readers[3], readers[4], readers[5]
        theirs = (readers[0], writers[1], readers[2], writers[3], writers[4], writers[5])
        try:
            reap = spawn(theirs)
        except BaseException:
            for fd in (lifeline, request, status, result, output, error):
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        hearers: dict[int, Callable[[bytes], None]] = {
            status: listener.hear_supervisor,
            result: listener.hear_answers,
            output: listener.stdout.feed,
            error: listener.stderr.feed,
        }
        group = cls(listener, reap, lifeline, request, hearers)
        for fd in hearers:
            os.set_blocking(fd, False)
            group.selector.register(fd, selectors.EVENT_READ)
        try:
            yield group
        finally:
            group.end()

    def order(self, order: BaseModel) -> None:
        """Hand over the work. If the worker has already exited, `attend` reports it."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.request, encode(order).lstrip())

    def dismiss(self) -> None:
        """Let the worker know that nothing more will be asked of it."""
        if self.request >= 0:
            os.close(self.request)
        self.request = -1

    def attend(self, deadline: float) -> None:
        """Listen until the worker has ended, its answer is in and its time to end is over, or it
        is late: then it is asked to end."""
        self.dismiss()
        while self.is_running():
            answered = self.listener.answered_at
            limit = deadline if answered is None else min(deadline, answered + EXIT_SECONDS)
            if time.monotonic() >= limit:
                break
            self.listen(limit - time.monotonic())
        if self.is_running():
            self.listener.overdue = True
            self.ask_to_end()
            self._listen_until(time.monotonic() + EXIT_SECONDS)

    def ask_to_end(self) -> None:
        """SIGTERM to the worker and all that it started."""
        self._tell(b"T")

    def kill(self) -> None:
        """SIGKILL to the worker and all that it started, without waiting for their end."""
        self._tell(b"K")

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.lifeline, word)

    def end(self) -> None:
        """End whatever still runs, hear the last of it and close all."""
        self.dismiss()
        os.close(self.lifeline)
        self._listen_until(time.monotonic() + KILL_SECONDS)
        if self.listener.wait_status is None:
            self._end_without_supervisor()
        self.reap()
        self.drain()
        self.listener.reader.close()
        self.selector.close()
        for fd in self.hearers:
            os.close(fd)

    def _end_without_supervisor(self) -> None:
        """The supervisor was ended from outside, or cannot end what hangs in the kernel."""
        if self.is_running():
            self.listener.flags.append("its processes could not be ended")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.listener.supervisor_pid is not None:
                os.kill(self.listener.supervisor_pid, signal.SIGKILL)
            if self.listener.worker_pid is not None:
                os.killpg(self.listener.worker_pid, signal.SIGKILL)

    def drain(self) -> None:
        """Read what the dead left in their pipes: no more than those hold."""
        for fd, hear in self.hearers.items():
            with contextlib.suppress(BlockingIOError):
                for _ in range(_PIPE_READS):
                    hear(os.read(fd, _READ_BYTES))

    def is_running(self) -> bool:
        """Whether the supervisor has more to say: it ends after all that it watched."""
        return self.listener.wait_status is None and not self.listener.supervisor_is_gone

    def _listen_until(self, deadline: float) -> None:
        while self.is_running() and (left := deadline - time.monotonic()) > 0:
            self.listen(left)

    def listen(self, seconds: float) -> None:
        """Hear what is said within so many seconds, or the first of it."""
        for key, _ in self.selector.select(max(0.0, seconds)):
            try:
                data = os.read(key.fd, _READ_BYTES)
            except BlockingIOError:
                continue
            if data:
                self.hearers[key.fd](data)
                continue
            self.selector.unregister(key.fd)
            if self.hearers[key.fd] == self.listener.hear_supervisor:
                self.listener.supervisor_is_gone = True


def attend(
    spawn: Spawn, listener: Listener[Any], order: Callable[[float], Order], deadline: float,
    deadline_seconds: float,
) -> Silence | None:  # fmt: skip
    """Has one worker carry out what `order` makes of the seconds that are left, until it and all
    that it started have ended. Why, where it gave no outcome."""
    kernel_kills = failure.count_kernel_kills()
    with WorkerGroup.start(spawn, listener) as group:
        group.order(order(deadline - time.monotonic()))
        group.attend(deadline)
    if listener.answered_at is not None:
        return None
    return judge_silence(listener, deadline_seconds, kernel_kills)
