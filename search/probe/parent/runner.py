"""Run one probe in a process of its own: spawn, listen, hold to the deadline, end, classify.

Imports no torch and makes no CUDA context. Whatever the worker does, the answer is a record.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median

from planner.schema import DeviceInfo, MeasurementRecord
from search.probe import failure
from search.probe.device import describe_device, memory_in_use, versions
from search.probe.parent import supervisor
from search.probe.parent.environment import probe_environment
from search.probe.parent.fork_server import ForkServer, ForkServerGoneError
from search.probe.protocol import (
    AnswerReader,
    OutcomeMessage,
    PhaseMessage,
    ProbeRequest,
    ProgressMessage,
    WorkOrder,
    encode,
)
from search.probe.stopping import images_per_step
from search.probe.worker import worker

# How long a worker may take to end after its answer, or after it was asked to: it has nothing left
# to do but to be torn down by the driver.
EXIT_SECONDS = 3.0
# How long the kernel may take to end killed processes before they are given up on (a process in an
# uninterruptible call to a driver cannot be killed).
KILL_SECONDS = 15.0
# How long a driver may take to give back the memory of a process that has ended: a judgement.
RELEASE_SECONDS = 3.0
# What is kept of each of the worker's output streams.
TAIL_BYTES = 16 * 1024
_READ_BYTES = 1 << 16
# A pipe holds 1 MiB at most (fs.pipe-max-size), unless root has said otherwise.
_PIPE_READS = (1 << 20) // _READ_BYTES


@dataclass(frozen=True)
class ProbeEvent:
    """Something a probe has come to. `elapsed_seconds` is since it was started.

    `phase` is start, import, device, build, compile, forward, backward, optimizer, warm-up,
    measure, check or end. While steps are timed, `num_steps` of them took `step_seconds` each (the
    median).
    """

    phase: str
    elapsed_seconds: float
    num_steps: int = 0
    step_seconds: float | None = None


def run_probe(
    request: ProbeRequest,
    *,
    deadline_seconds: float,
    device: DeviceInfo | None = None,
    on_event: Callable[[ProbeEvent], None] | None = None,
    on_result: Callable[[MeasurementRecord], None] | None = None,
    worker_command: Sequence[str] | None = None,
    fork_server: ForkServer | None = None,
) -> MeasurementRecord:
    """One short real training run of `request`, from the start of its process to the end of it.

    Returns a record whatever happens to the worker: after `deadline_seconds` it and all that it
    started are ended. Raises UsageError where there is no such device, and what `on_event` raises
    (the worker is ended then, too). A `fork_server` spares the worker the import of torch;
    `device` is how the record describes it, where that is not as `request` says;
    `worker_command` runs another worker, with the two file descriptors as its last arguments.
    `on_result` is told what the worker measured as soon as it has said so: ending a process that
    holds a device takes a while, in which this one may be killed.
    """
    found = describe_device(request.device)
    if request.capability is None:
        request = request.model_copy(update={"capability": found.capability})
    cap = {"memory_cap_bytes": request.memory_cap_bytes}
    described = device or found.model_copy(update=cap)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    free, used = _free_and_used(request.device)
    started = time.monotonic()

    def record_of(outcome: OutcomeMessage) -> MeasurementRecord:
        step_seconds = median(outcome.step_seconds) if outcome.step_seconds else None
        return MeasurementRecord(
            model=request.model,
            setting=request.setting,
            device=described,
            versions=versions(),
            date=date,
            images_per_second=images_per_step(request) / step_seconds if step_seconds else None,
            probe_seconds=time.monotonic() - started,
            **_shared_fields(outcome),
        )

    def answered(outcome: OutcomeMessage) -> None:
        if on_result is not None:
            on_result(record_of(outcome))

    listener = _Listener(request.probe_id, started, on_event or (lambda event: None), answered)
    kernel_kills = failure.count_kernel_kills()
    deadline = started + deadline_seconds
    with _WorkerGroup.start(
        _choose_spawn(fork_server, worker_command, deadline), listener
    ) as group:
        group.order(WorkOrder(request=request, deadline_seconds=deadline - time.monotonic()))
        group.attend(deadline)
    outcome = listener.outcome or _judge_silence(listener, deadline_seconds, kernel_kills)
    if outcome.free_bytes is None and free is not None:
        taken = None if listener.wait_status is None else _taken(request.device, used)
        outcome = outcome.model_copy(update={"free_bytes": free, "taken_bytes": taken})
    listener.tell("end")
    return record_of(outcome)


def _free_and_used(device: str) -> tuple[int | None, int | None]:
    """Bytes of a GPU that are free, and that processes hold, of which this one is none; None where
    the driver does not say. The CPU's memory is the worker's own growth: others do not count."""
    found = memory_in_use(device) if device != "cpu" else None
    return (None, None) if found is None else (found.free_bytes, found.used_bytes)


def _taken(device: str, used_before: int | None) -> int | None:
    """What others took of a GPU's memory since `used_before` was read, in bytes, where a worker
    that has ended could not say. The driver may still be giving its memory back: that is awaited.
    """
    deadline = time.monotonic() + RELEASE_SECONDS
    while used_before is not None:
        now = _free_and_used(device)[1]
        if now is None:
            return None
        if now <= used_before or time.monotonic() >= deadline:
            return max(0, now - used_before)
        time.sleep(RELEASE_SECONDS / 30)
    return None


def _shared_fields(outcome: OutcomeMessage) -> dict[str, object]:
    return {
        name: getattr(outcome, name)
        for name in OutcomeMessage.model_fields
        if name not in ("format", "type")
    }


def _judge_silence(
    listener: _Listener, deadline_seconds: float, kernel_kills: int | None
) -> OutcomeMessage:
    """The outcome of a worker that ended, or was ended, without telling one."""

    def ended(status: str, message: str) -> OutcomeMessage:
        return OutcomeMessage.model_validate(
            {
                "probe_id": listener.reader.probe_id,
                "status": status,
                "message": message,
                "phase": listener.phase,
                "flags": listener.flags,
            }
        )

    words = failure.last_words(listener.stderr.text())
    if listener.overdue:
        return ended("timed_out", f"not done after {deadline_seconds:g} s, in {listener.phase}")
    if listener.wait_status is None:
        return ended("crashed", "its supervisor was ended from outside")
    said = failure.describe_exit(listener.wait_status)
    if failure.is_allocation_failure(words):
        return ended("out_of_memory", f"{said}\n{words}")
    killed = os.WIFSIGNALED(listener.wait_status) and (
        os.WTERMSIG(listener.wait_status) == signal.SIGKILL
    )
    if killed and _kernel_ran_out(kernel_kills):
        return ended("out_of_memory", "the kernel killed it: the machine is out of memory")
    if listener.reader.num_garbage:
        said += f"; {listener.reader.num_garbage} unreadable messages and no answer"
    elif os.WIFEXITED(listener.wait_status) and os.WEXITSTATUS(listener.wait_status) == 0:
        said += " and no answer"
    return ended("crashed", f"{said}\n{words}".strip())


def _kernel_ran_out(kills_before: int | None) -> bool:
    """Whether a SIGKILL that was not ours was the kernel's: its count of such kills has risen.

    Where the kernel keeps no count, memory is by far the likeliest reason.
    """
    kills = failure.count_kernel_kills()
    return kills is None or kills_before is None or kills > kills_before


class _Tail:
    """The last `TAIL_BYTES` of a stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data
        del self._bytes[:-TAIL_BYTES]

    def text(self) -> str:
        return self._bytes.decode(errors="replace")


class _Listener:
    """All that the parent hears of one worker, kept within bounds."""

    def __init__(
        self, probe_id: str, started: float, on_event: Callable[[ProbeEvent], None],
        on_result: Callable[[OutcomeMessage], None],
    ) -> None:  # fmt: skip
        self.reader = AnswerReader(probe_id)
        self.stdout, self.stderr = _Tail(), _Tail()
        self.started = started
        self.on_event = on_event
        self.on_result = on_result
        self.phase = "start"
        self.overdue = False
        self.supervisor_pid: int | None = None
        self.supervisor_is_gone = False
        self.worker_pid: int | None = None
        self.wait_status: int | None = None
        self.flags: list[str] = []
        self._status = b""
        self._outcome: OutcomeMessage | None = None
        self.answered_at: float | None = None

    @property
    def outcome(self) -> OutcomeMessage | None:
        """The worker's answer, with what the parent has to add."""
        if self._outcome is None:
            return None
        garbage = self.reader.num_garbage
        flags = [*self._outcome.flags, *self.flags]
        if garbage:
            flags.append(f"{garbage} unreadable messages on the result channel")
        return self._outcome.model_copy(update={"flags": tuple(flags)})

    def tell(self, phase: str, num_steps: int = 0, step_seconds: float | None = None) -> None:
        elapsed = time.monotonic() - self.started
        self.on_event(ProbeEvent(phase, elapsed, num_steps, step_seconds))

    def hear_answers(self, data: bytes) -> None:
        for answer in self.reader.feed(data):
            if isinstance(answer, OutcomeMessage):
                self._outcome = answer
                self.answered_at = time.monotonic()
                self.on_result(answer)
            elif isinstance(answer, PhaseMessage):
                self.phase = answer.phase
                self.tell(answer.phase)
            elif isinstance(answer, ProgressMessage):
                self.tell(self.phase, answer.num_steps, answer.step_seconds)

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


def _choose_spawn(
    fork_server: ForkServer | None, command: Sequence[str] | None, deadline: float
) -> Spawn:
    """From the fork server where there is one; where it is gone, or with a command, by itself."""

    def spawn(fds: Sequence[int]) -> Callable[[], object]:
        if fork_server is not None and command is None:
            with contextlib.suppress(ForkServerGoneError):
                return fork_server.spawn(fds, deadline)
        return _spawn_process(command or worker.COMMAND, fds)

    return spawn


def _spawn_process(command: Sequence[str], fds: Sequence[int]) -> Callable[[], object]:
    """Start a supervisor as a process of ours, which starts `command`."""
    lifeline, status, request, result, output, error = fds
    arguments = [str(lifeline), str(status), *command, str(request), str(result)]
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", supervisor.__file__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=error,
        pass_fds=(lifeline, status, request, result),
        start_new_session=True,
        env=probe_environment(),
    )
    return process.wait


@dataclass
class _WorkerGroup:
    """A supervisor and what it watches. Leaving the context ends them all."""

    listener: _Listener
    reap: Callable[[], object]
    lifeline: int
    request: int
    hearers: dict[int, Callable[[bytes], None]]
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    @classmethod
    @contextlib.contextmanager
    def start(cls, spawn: Spawn, listener: _Listener) -> Iterator[_WorkerGroup]:
        listener.tell("start")
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

    def order(self, order: WorkOrder) -> None:
        """Hand over the work. If the worker has already exited, `attend` reports it."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.request, encode(order).lstrip())
        os.close(self.request)

    def attend(self, deadline: float) -> None:
        """Listen until the worker has ended, its answer is in and its time to end is over, or it
        is late: then it is asked to end."""
        while self.is_running():
            answered = self.listener.answered_at
            limit = deadline if answered is None else min(deadline, answered + EXIT_SECONDS)
            if time.monotonic() >= limit:
                break
            self._listen(limit - time.monotonic())
        if self.is_running():
            self.listener.overdue = True
            os.write(self.lifeline, b"T")
            self._listen_until(time.monotonic() + EXIT_SECONDS)

    def end(self) -> None:
        """End whatever still runs, hear the last of it and close all."""
        os.close(self.lifeline)
        self._listen_until(time.monotonic() + KILL_SECONDS)
        if self.listener.wait_status is None:
            self._end_without_supervisor()
        self.reap()
        self._drain()
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

    def _drain(self) -> None:
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
            self._listen(left)

    def _listen(self, seconds: float) -> None:
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
