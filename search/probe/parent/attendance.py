"""The tuner's side of workers: start them, listen, hold them to one deadline, end them together and
judge their end once.

A probe has one worker, or one for each rank of a world. Each has a supervisor of its own, so that
nothing is left of it, however it or the tuner ends: torchrun's agent would be one more process to
lose, and its workers outlive it where it is killed. What a worker does is not known here; imports
no torch.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.core import failures
from planner.machine import supervisor
from search.probe import failure
from search.probe.parent.environment import probe_environment
from search.probe.parent.fork_server import ForkServer, ForkServerGoneError
from search.probe.parent.ranks import shared_flags
from search.probe.protocol import (
    AnswerReader,
    OutcomeMessage,
    PhaseMessage,
    WorkOrder,
    encode,
)
from search.probe.worker import worker as training

# How long a worker may take to end after its answer, or after it was asked to: it has nothing left
# to do but to be torn down by the driver.
EXIT_SECONDS = 3.0
# How long the kernel may take to end killed processes before they are given up on (a process in an
# uninterruptible call to a driver cannot be killed).
KILL_SECONDS = 15.0
# A rank that lost another says so within a moment; that one's own end may take longer to be told
# (a stack to print, a core to write). So long it is waited for.
CAUSE_SECONDS = 5.0
# What is kept of a worker's standard error.
TAIL_BYTES = 16 * 1024
_READ_BYTES = 1 << 16
# A pipe holds 1 MiB at most (fs.pipe-max-size), unless root has said otherwise.
_PIPE_READS = (1 << 20) // _READ_BYTES
# The phases of a probe, in which a rank that hangs is behind those that wait for it.
_PHASES = (
    "start", "import", "device", "join", "build", "compile", "forward", "backward", "optimizer",
    "zero_grad", "warm-up", "measure", "check",
)  # fmt: skip

# Starts a supervisor and its worker on five channels: lifeline, status, request, result, error.
# Returns what to call when the supervisor has ended.
Start = Callable[[Sequence[int]], Callable[[], object]]


def start_process(command: Sequence[str], fds: Sequence[int]) -> Callable[[], object]:
    """Start a supervisor as a process of ours, and by it a worker: `command` with the descriptors
    of its two channels."""
    lifeline, status, request, result, error = map(str, fds)
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", supervisor.__file__, lifeline, status, *command, request,
         result],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=int(error),
        pass_fds=fds[:4],
        start_new_session=True,
        env=probe_environment(),
    )  # fmt: skip
    return process.wait


class Worker:
    """A worker and its supervisor: what they say, kept within bounds, and how they ended. Leaving
    the context ends them and all that they started. `hear` is given all answers."""

    def __init__(self, start: Start, reader: AnswerReader, hear: Callable[[Any], None]) -> None:
        self.reader, self.hear = reader, hear
        self.phase = "start"
        self.outcome: Any = None
        self.wait_status: int | None = None
        self._pids: tuple[int, ...] = ()
        self._own_flags: list[str] = []
        self._status, self._errors = b"", b""
        self._supervisor_is_gone = False
        pipes = [os.pipe() for _ in range(5)]
        (read_lifeline, self._lifeline), (read_request, self._request) = pipes[0], pipes[2]
        self._status_fd, result, error = pipes[1][0], pipes[3][0], pipes[4][0]
        self._hearers = {
            self._status_fd: self._hear_supervisor,
            result: self._hear_answers,
            error: self._hear_errors,
        }
        theirs = (read_lifeline, pipes[1][1], read_request, pipes[3][1], pipes[4][1])
        try:
            self._reap = start(theirs)
        except BaseException:
            for fd in (self._lifeline, self._request, *self._hearers):
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self.selector = selectors.DefaultSelector()
        for fd in self._hearers:
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ)

    @property
    def flags(self) -> tuple[str, ...]:
        """What the parent has to add to a worker's answer."""
        garbage = self.reader.num_garbage
        told = [f"{garbage} unreadable messages on the result channel"] if garbage else []
        return (*self._own_flags, *told)

    def _hear_answers(self, data: bytes) -> None:
        for answer in self.reader.feed(data):
            if isinstance(answer, OutcomeMessage):
                self.outcome = answer
            elif isinstance(answer, PhaseMessage):
                self.phase = answer.phase
            self.hear(answer)

    def _hear_errors(self, data: bytes) -> None:
        self._errors = (self._errors + data)[-TAIL_BYTES:]

    def _hear_supervisor(self, data: bytes) -> None:
        *lines, self._status = (self._status + data).split(b"\n")
        for line in lines:
            word, first, second = line.decode().split()
            if word == "started":
                self._pids = int(first), int(second)
            else:
                self.wait_status = int(first)
                if int(second):
                    self._own_flags.append(f"left {second} processes behind, which were ended")

    def order(self, order: WorkOrder) -> None:
        """Hand over the work. If the worker has already exited, that is judged later."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._request, encode(order).lstrip())

    def dismiss(self) -> None:
        """Let the worker know that nothing more will be asked of it."""
        if self._request >= 0:
            os.close(self._request)
        self._request = -1

    def ask_to_end(self) -> None:
        """SIGTERM to the worker and all that it started."""
        self._tell(b"T")

    def kill(self) -> None:
        """SIGKILL to the worker and all that it started, without waiting for their end."""
        self._tell(b"K")

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._lifeline, word)

    def is_running(self) -> bool:
        """Whether the supervisor has more to say: it ends after all that it watched."""
        return self.wait_status is None and not self._supervisor_is_gone

    def listen(self, seconds: float = 0.0) -> None:
        """Hear what is said within so many seconds, or the first of it."""
        for key, _ in self.selector.select(seconds):
            try:
                data = os.read(key.fd, _READ_BYTES)
            except BlockingIOError:
                continue
            if data:
                self._hearers[key.fd](data)
                continue
            self.selector.unregister(key.fd)
            self._supervisor_is_gone |= key.fd == self._status_fd

    def drain(self) -> None:
        """Read what the dead left in their pipes: no more than those hold."""
        for fd, hear in self._hearers.items():
            with contextlib.suppress(BlockingIOError):
                for _ in range(_PIPE_READS):
                    hear(os.read(fd, _READ_BYTES))

    def judge(self, kernel_kills: int | None) -> dict[str, Any]:
        """The outcome of one that has ended without any; `kernel_kills` were counted before it."""
        errors = self._errors.decode(errors="replace")
        said = {"phase": self.phase, "lost_others": failures.is_lost_peer(errors)}
        if self.wait_status is None:
            return said | {"status": "crashed", "message": "its supervisor was ended from outside"}
        silent = ""
        if self.reader.num_garbage:
            silent = f"; {self.reader.num_garbage} unreadable messages and no answer"
        elif os.WIFEXITED(self.wait_status) and os.WEXITSTATUS(self.wait_status) == 0:
            silent = " and no answer"
        words = failure.last_words(errors)
        status, message = failure.judge_death(self.wait_status, words, kernel_kills, silent)
        return said | {"status": status, "message": message}

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """End whatever still runs, hear the last of it and close all."""
        self.dismiss()
        os.close(self._lifeline)
        deadline = time.monotonic() + KILL_SECONDS
        while self.is_running() and (left := deadline - time.monotonic()) > 0:
            self.listen(left)
        if self.wait_status is None:
            self._end_without_supervisor()
        self._reap()
        self.drain()
        self.reader.close()
        self.selector.close()
        for fd in self._hearers:
            os.close(fd)

    def _end_without_supervisor(self) -> None:
        """The supervisor was ended from outside, or cannot end what hangs in the kernel."""
        if self.is_running():
            self._own_flags.append("its processes could not be ended")
        for pid, kill in zip(self._pids, (os.kill, os.killpg), strict=False):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)


@dataclass
class Attendance:
    """One worker for each of `orders`, in a world of ranks where they have a place,
    until it and all that it started have ended.

    They are forked from `fork_server` where there is one; where it is gone, or with a `command`,
    they are processes of their own. `hear` is told what the first says until it ends, and what all
    measured as soon as they have; `put_together` makes one outcome of theirs: by default the
    first's.
    """

    orders: Sequence[WorkOrder]
    hear: Callable[[Any], None]
    deadline_seconds: float
    fork_server: ForkServer | None = None
    command: Sequence[str] | None = None
    put_together: Callable[[Sequence[OutcomeMessage]], OutcomeMessage] | None = None
    workers: list[Worker] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)  # in the order in which it was heard

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.deadline_seconds
        self.kernel_kills = failure.count_kernel_kills()
        self.probe_id = self.orders[0].request.probe_id

    def run(self) -> OutcomeMessage:
        """What the workers measured together; where one has failed, how, and none is left."""
        with contextlib.ExitStack() as stack:
            try:
                for order in self.orders:
                    reader = AnswerReader(self.probe_id)
                    hear = self._hear_first if not self.workers else lambda answer: None
                    worker = stack.enter_context(Worker(self._start, reader, hear))
                    self.workers.append(worker)
                    left = self.deadline - time.monotonic()
                    worker.order(order.model_copy(update={"deadline_seconds": left}))
                outcome = self._attend()
            finally:
                for worker in self.workers:
                    worker.kill()
        told = shared_flags([worker.flags for worker in self.workers])
        return outcome.model_copy(update={"flags": (*outcome.flags, *told)})

    @property
    def has_ended(self) -> bool:
        """Whether every worker is known to have ended."""
        return all(worker.wait_status is not None for worker in self.workers)

    def _start(self, fds: Sequence[int]) -> Callable[[], object]:
        if self.fork_server is not None and self.command is None:
            with contextlib.suppress(ForkServerGoneError):
                return self.fork_server.spawn(fds, self.deadline)
        return start_process(self.command or training.COMMAND, fds)

    def _hear_first(self, answer: Any) -> None:
        if not isinstance(answer, OutcomeMessage):
            self.hear(answer)

    def _attend(self) -> OutcomeMessage:
        """Listens to all until they have measured, one has failed, or they are late."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.selector, selectors.EVENT_READ, worker)
            limit = self.deadline
            while not self._is_decided():
                late = time.monotonic() >= limit
                self._listen(selector, limit)
                if late:
                    break
                if self.failed:
                    limit = min(limit, time.monotonic() + CAUSE_SECONDS)
            ending = [worker for worker in self.workers if worker.outcome is not None]
            if self.failed:
                outcome = self._blame()
            elif len(ending) == len(self.workers):
                outcome = self.workers[0].outcome
                if self.put_together is not None:
                    outcome = self.put_together([worker.outcome for worker in self.workers])
                self.hear(outcome)
            else:
                outcome, ending = self._late(), self.workers
                for worker in self.workers:
                    worker.ask_to_end()
            for worker in ending:
                worker.dismiss()
            limit = time.monotonic() + EXIT_SECONDS
            while any(worker.is_running() for worker in ending) and time.monotonic() < limit:
                self._listen(selector, limit)
        return outcome

    def _listen(self, selector: selectors.BaseSelector, limit: float) -> None:
        for key, _ in selector.select(max(0.0, limit - time.monotonic())):
            key.data.listen()
        for rank, worker in enumerate(self.workers):
            if worker.outcome is None and not worker.is_running():
                worker.drain()  # its last word may lie in the pipe
                worker.reader.close()
            if worker.outcome is None and not worker.is_running():
                judged = {"probe_id": self.probe_id, **worker.judge(self.kernel_kills)}
                worker.outcome = OutcomeMessage.model_validate(judged)
            outcome = worker.outcome
            if outcome and outcome.status != "measured" and rank not in self.failed:
                self.failed.append(rank)

    def _is_decided(self) -> bool:
        """Whether one failed by itself, or all have measured. One that failed for others' sake
        decides nothing yet."""
        return self._cause() is not None or all(
            worker.outcome and worker.outcome.status == "measured" for worker in self.workers
        )

    def _cause(self) -> int | None:
        alone = (rank for rank in self.failed if not self.workers[rank].outcome.lost_others)
        return next(alone, None)

    def _blame(self) -> OutcomeMessage:
        """What ended the probe: the first that failed by itself, else the first that lost others,
        of which none has said why."""
        cause = self._cause()
        rank = self.failed[0] if cause is None else cause
        outcome: OutcomeMessage = self.workers[rank].outcome
        if self.orders[0].place is None:
            return outcome
        said = f"rank {rank} of {len(self.workers)}: {outcome.message}"
        return outcome.model_copy(update={"message": said})

    def _late(self) -> OutcomeMessage:
        """Where each was at the deadline; the probe's phase is that of the one behind."""
        by_phase: dict[str, list[str]] = {}
        for rank, worker in sorted(enumerate(self.workers), key=lambda w: _position(w[1].phase)):
            by_phase.setdefault(worker.phase, []).append(str(rank))
        phase = next(iter(by_phase))
        where = f", in {phase}"
        if self.orders[0].place is not None:
            where = ": " + "; ".join(
                f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} in {phase}"
                for phase, ranks in by_phase.items()
            )
        return OutcomeMessage.model_validate({
            "probe_id": self.probe_id, "status": "timed_out", "phase": phase,
            "message": f"not done after {self.deadline_seconds:g} s{where}",
        })  # fmt: skip


def _position(phase: str) -> int:
    return _PHASES.index(phase) if phase in _PHASES else len(_PHASES)
