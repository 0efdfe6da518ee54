"""Runs one probe in a process of its own: starts it, listens, ends it at the deadline, classifies.

Imports no torch and makes no CUDA context. Whatever the worker does, the result is a record.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from statistics import median

from pydantic import ValidationError

from planner.core import failures
from planner.core.schema import DeviceInfo, MeasurementRecord, Model, ProbeStatus, TrainSetting
from planner.core.schema.record import RankRecord, WorldInfo
from planner.core.units import MIB
from planner.machine.forking import ForkServer, Workers
from planner.machine.host import read_host
from planner.recording.recordings import library_modules
from search.probe import protocol
from search.probe.device import (
    MemoryInUse,
    describe_device,
    device_index,
    memory_in_use,
    versions,
    worker_environment,
)

# A driver may take so long to free the memory of a process that has ended: a judgement.
RELEASE_SECONDS = 3.0


def run_probe(
    request: protocol.ProbeRequest,
    *,
    deadline_seconds: float,
    device: DeviceInfo | None = None,
    on_event: Callable[[protocol.ProgressMessage], None] = lambda event: None,
    on_result: Callable[[MeasurementRecord], None] = lambda record: None,
    fork_server: ProbeServer | None = None,
) -> MeasurementRecord:
    """Runs `request`, a short real training, in a process of its own from its start to its end.

    Returns a record whatever happens to the worker: after `deadline_seconds` the worker and all
    that it started are ended. Workers are forked from `fork_server`, else from one of their own.
    `device` is how the record describes the device (None: as `request` does). `on_result` receives
    what the worker measured at once: to end a process that holds a device takes a while, in which
    this one may be killed. Raises UsageError for an unknown device, and what `on_event` raises,
    after ending the worker.
    """
    devices = rank_devices(request.device, request.setting)
    first, *_ = [describe_device(name) for name in dict.fromkeys(devices)]
    described = device or first.model_copy(update={"memory_cap_bytes": request.memory_cap_bytes})
    date = datetime.now(UTC).isoformat(timespec="seconds")
    # What other processes hold of each GPU. On the CPU only the worker's own growth counts.
    before = {name: memory_in_use(name) for name in devices if name != "cpu"}
    started = time.monotonic()
    record_of = partial(_record, request, described, date, started)
    is_world = request.setting.parallelism != "none"

    def report_measured(outcomes: Sequence[protocol.OutcomeMessage]) -> None:
        on_result(record_of(merge_ranks(outcomes, devices)))

    on_event(protocol.ProgressMessage(phase="start"))
    with (
        nullcontext(fork_server) if fork_server else ProbeServer(request.model) as server,
        rank_places(len(devices), rank_threads(len(devices))) as places,
    ):
        orders = [
            protocol.WorkOrder(
                request=request.model_copy(update={"device": name}),
                deadline=started + deadline_seconds, place=place if is_world else None,
            )
            for name, place in zip(devices, places, strict=True)
        ]  # fmt: skip
        monitor = WorkerMonitor(orders, deadline_seconds, server, on_event)
        outcome = merge_ranks(monitor.run(report_measured), devices)
    if outcome.free_bytes is None:
        outcome = _with_crowding(outcome, before, monitor.has_ended)
    on_event(protocol.ProgressMessage(phase="end"))
    return record_of(outcome)


def _record(
    request: protocol.ProbeRequest,
    device: DeviceInfo,
    date: str,
    started: float,
    outcome: protocol.OutcomeMessage,
) -> MeasurementRecord:
    step_seconds = median(outcome.step_seconds) if outcome.step_seconds else None
    return MeasurementRecord(
        probe_id=request.probe_id,
        model=request.model,
        setting=request.setting,
        device=device,
        versions=versions(),
        date=date,
        images_per_second=request.setting.images_per_device_step / step_seconds
        if step_seconds
        else None,
        probe_seconds=time.monotonic() - started,
        **{
            name: getattr(outcome, name)
            for name in MeasurementRecord.model_fields.keys()
            & protocol.OutcomeMessage.model_fields.keys()
        },
    )


def _with_crowding(
    outcome: protocol.OutcomeMessage, before: Mapping[str, MemoryInUse | None], has_ended: bool
) -> protocol.OutcomeMessage:
    """`outcome` with what others had left free of its GPUs and have taken since, on the fullest of
    them. While the worker may still live, nothing separates what it holds from what others hold."""
    readings = {device: memory for device, memory in before.items() if memory is not None}
    if not readings:
        return outcome
    free = min(memory.free_bytes for memory in readings.values())
    taken = [_taken(device, m.used_bytes) for device, m in readings.items()] if has_ended else []
    highest = max((n for n in taken if n is not None), default=None)
    return outcome.model_copy(update={"free_bytes": free, "taken_bytes": highest})


def _taken(device: str, used_before: int) -> int | None:
    """The bytes of a GPU that others have taken since `used_before` was read, once the worker has
    ended. Waits for the driver, which may still be freeing the worker's memory."""
    deadline = time.monotonic() + RELEASE_SECONDS
    while (now := memory_in_use(device)) is not None:
        if now.used_bytes <= used_before or time.monotonic() >= deadline:
            return max(0, now.used_bytes - used_before)
        time.sleep(RELEASE_SECONDS / 30)
    return None


# A rank reports at once that it lost another one. The end of the lost one may be known later: it
# prints a stack, or writes a core. After such a report, wait this long for the cause.
CAUSE_SECONDS = 5.0
# So much is kept of the end of a worker's standard error.
TAIL_BYTES = 16 * 1024
# It is read at least this often: a pipe holds 64 KiB.
_READ_BYTES, _NUM_READS, _READ_SECONDS = 1 << 16, 16, 0.25
# The phases of a probe in their order: a rank that hangs is in an earlier one than those that wait.
_PHASES = (
    "start", "import", "device", "join", "build", "compile", "forward", "backward", "optimizer",
    "zero_grad", "warm-up", "measure", "check",
)  # fmt: skip


@dataclass
class _Rank:
    """What is known of one worker; `errors` is the end of its standard error, whose pipe is read
    from `errors_fd`."""

    errors_fd: int
    phase: str = "start"
    errors: bytes = b""
    outcome: protocol.OutcomeMessage | None = None

    def read_errors(self) -> None:
        """Reads what there is, with a bound on it: a worker may write for ever."""
        with suppress(BlockingIOError):
            for _ in range(_NUM_READS):
                self.errors = (self.errors + os.read(self.errors_fd, _READ_BYTES))[-TAIL_BYTES:]


class WorkerMonitor:
    """Runs a worker for each of `orders`, forked from `server`, until it and all that it started
    have ended. `hear` receives the progress of the first."""

    def __init__(
        self, orders: Sequence[protocol.WorkOrder], deadline_seconds: float, server: ProbeServer,
        hear: Callable[[protocol.ProgressMessage], None],
    ) -> None:  # fmt: skip
        self.orders, self.server, self.hear = orders, server, hear
        self.deadline_seconds = deadline_seconds
        self.is_world = orders[0].place is not None
        self.failed: dict[int, protocol.OutcomeMessage] = {}  # in the order in which it was heard
        self.has_ended = False  # for certain
        self.kernel_kills = protocol.count_kernel_kills()

    def run(
        self, on_measured: Callable[[Sequence[protocol.OutcomeMessage]], None]
    ) -> list[protocol.OutcomeMessage]:
        """What each worker measured, of which `on_measured` hears before they end; where one has
        failed, only that failure."""
        with _pipes(len(self.orders)) as (reading, writing):
            self.ranks = [_Rank(fd) for fd in reading]
            orders = [order.model_dump_json() for order in self.orders]
            with self.server.fork(self.server.work, orders, writing) as workers:
                outcomes = self._watch(workers)
                if outcomes[0].status == "measured":
                    on_measured(outcomes)
            self.has_ended = workers.are_gone
        return outcomes

    def _watch(self, workers: Workers) -> list[protocol.OutcomeMessage]:
        limit = self.orders[0].deadline
        while not (self._is_decided() or workers.are_gone):
            left = max(0.0, limit - time.monotonic())
            message = workers.hear(min(left, _READ_SECONDS))
            for rank in self.ranks:
                rank.read_errors()
            if message:
                self._hear(message)
            elif not left:
                break
            if self.failed:
                limit = min(limit, time.monotonic() + CAUSE_SECONDS)
        for number in range(len(self.ranks) if workers.are_gone else 0):
            self._settle(number, self._judge(number, None))
        if self.failed:
            return [self._blame()]
        outcomes = [rank.outcome for rank in self.ranks if rank.outcome is not None]
        return outcomes if len(outcomes) == len(self.ranks) else [self._timed_out()]

    def _hear(self, message: bytes) -> None:
        if message.startswith(b"ended"):
            wait_status, number = map(int, message.split()[1:])
            self._settle(number, self._judge(number, wait_status))
            return
        try:
            answer = protocol.ANSWERS.validate_json(message)
        except ValidationError:  # the model's own code wrote it
            return
        if isinstance(answer, protocol.OutcomeMessage):
            self._settle(answer.rank, answer)
            return
        self.ranks[answer.rank].phase = answer.phase
        if answer.rank == 0:
            self.hear(answer)

    def _settle(self, number: int, outcome: protocol.OutcomeMessage) -> None:
        """Notes the outcome of a worker; only its first counts."""
        if self.ranks[number].outcome is None:
            self.ranks[number].outcome = outcome
            if outcome.status != "measured":
                self.failed[number] = outcome

    def _judge(self, number: int, wait_status: int | None) -> protocol.OutcomeMessage:
        """The outcome of a worker that ended without one."""
        rank = self.ranks[number]
        rank.read_errors()
        errors = rank.errors.decode(errors="replace")
        status: ProbeStatus = "crashed"
        message = "its supervisor was ended from outside"
        if wait_status is not None:
            words = protocol.last_words(errors)
            status, message = protocol.judge_death(wait_status, words, self.kernel_kills)
        lost = failures.is_lost_peer(errors)
        return protocol.OutcomeMessage(
            status=status, message=message, phase=rank.phase, lost_others=lost
        )

    def _is_decided(self) -> bool:
        """Whether a worker failed by itself, or all have measured. One that failed because others
        are gone decides nothing yet."""
        return self._cause() is not None or all(
            rank.outcome is not None and rank.outcome.status == "measured" for rank in self.ranks
        )

    def _cause(self) -> int | None:
        return next((n for n, outcome in self.failed.items() if not outcome.lost_others), None)

    def _blame(self) -> protocol.OutcomeMessage:
        """The outcome that ended the probe: the first worker's that failed by itself, else the
        first one's that lost others, none of which said why."""
        cause = self._cause()
        number = next(iter(self.failed)) if cause is None else cause
        outcome = self.failed[number]
        if not self.is_world:
            return outcome
        message = f"rank {number} of {len(self.ranks)}: {outcome.message}"
        return outcome.model_copy(update={"message": message})

    def _timed_out(self) -> protocol.OutcomeMessage:
        """The outcome at the deadline, with the phase of each rank; the probe's is the earliest."""
        by_phase: dict[str, list[str]] = {}
        for number, rank in sorted(enumerate(self.ranks), key=lambda r: _position(r[1].phase)):
            by_phase.setdefault(rank.phase, []).append(str(number))
        where = f", in {next(iter(by_phase))}"
        if self.is_world:
            where = ": " + "; ".join(
                f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} in {phase}"
                for phase, ranks in by_phase.items()
            )
        message = f"not done after {self.deadline_seconds:g} s{where}"
        return protocol.OutcomeMessage(
            status="timed_out", phase=next(iter(by_phase)), message=message
        )


def _position(phase: str) -> int:
    return _PHASES.index(phase) if phase in _PHASES else len(_PHASES)


@contextmanager
def _pipes(number: int) -> Iterator[tuple[list[int], list[int]]]:
    """The reading and the writing ends of so many pipes; reading does not block."""
    pairs = [os.pipe() for _ in range(number)]
    try:
        for reading, _ in pairs:
            os.set_blocking(reading, False)
        yield [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    finally:
        for fd in (fd for pair in pairs for fd in pair):
            os.close(fd)


def rank_devices(device: str, setting: TrainSetting) -> tuple[str, ...]:
    """The device of each rank: consecutive GPUs from `device` on, or the CPU for all."""
    if setting.parallelism == "none":
        return (device,)
    size = setting.world_size
    if device == "cpu":
        return ("cpu",) * size
    first = device_index(device)
    return tuple(f"cuda:{first + rank}" for rank in range(size))


@contextmanager
def rank_places(size: int, threads: int) -> Iterator[tuple[protocol.RankPlace, ...]]:
    """Within, the place of each rank. Ranks find each other by a file in this process's memory: no
    port that somebody else may take, nothing to delete."""
    descriptor = os.memfd_create("planner-world")
    store = f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        yield tuple(protocol.RankPlace(rank=r, store=store, threads=threads) for r in range(size))
    finally:
        os.close(descriptor)


# Figures of which the largest of any rank stands for all.
_LARGEST = (
    "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "compile_seconds", "taken_bytes",
)  # fmt: skip


def merge_ranks(
    outcomes: Sequence[protocol.OutcomeMessage], devices: Sequence[str]
) -> protocol.OutcomeMessage:
    """The outcome of a probe whose ranks have all measured, rank 0 first: each step as long as on
    the slowest rank, each peak the highest of any rank. A single outcome, of one rank or of a probe
    that failed, stays as it is."""
    if len(outcomes) == 1:
        return outcomes[0]
    steps = zip(*(o.step_seconds for o in outcomes), strict=False)  # all have taken the same
    free = [o.free_bytes for o in outcomes if o.free_bytes is not None]
    return outcomes[0].model_copy(
        update={
            **{name: _largest(outcomes, name) for name in _LARGEST},
            "step_seconds": tuple(max(step) for step in steps),
            "free_bytes": min(free, default=None),
            "flags": shared_flags([o.flags for o in outcomes]),
            "ranks": tuple(
                RankRecord(
                    rank=rank,
                    device=device,
                    step_seconds=median(outcome.step_seconds),
                    peak_allocated_bytes=outcome.peak_allocated_bytes,
                    peak_reserved_bytes=outcome.peak_reserved_bytes,
                    device_bytes=outcome.device_bytes,
                )
                for rank, (outcome, device) in enumerate(zip(outcomes, devices, strict=True))
            ),
            "world": WorldInfo(world_size=len(devices), backend=protocol.backend_of(devices[0])),
        }
    )


def _largest(outcomes: Sequence[protocol.OutcomeMessage], name: str) -> float | None:
    figures = (getattr(outcome, name) for outcome in outcomes)
    return max((figure for figure in figures if figure is not None), default=None)


def shared_flags(flags: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The flags of all ranks once, and those of only some ranks with their numbers."""
    ranks_of: dict[str, list[int]] = {}
    for rank, rank_flags in enumerate(flags):
        for flag in dict.fromkeys(rank_flags):
            ranks_of.setdefault(flag, []).append(rank)
    return tuple(
        flag if len(ranks) == len(flags) else f"rank {', '.join(map(str, ranks))}: {flag}"
        for flag, ranks in ranks_of.items()
    )


# Modules for every probe: the first optimizer of a process would import torch._dynamo.
STEP_MODULES = ("search.probe.worker.measure", "torch._dynamo")
# Modules for ranks: FSDP's part of torch takes another second to import.
WORLD_MODULES = (*STEP_MODULES, "torch.distributed.fsdp")


class ProbeServer(ForkServer):
    """The server from which probes fork. It imports `modules` and the library of `model`; a user's
    factory runs only in workers. Workers call `work`, in the environment and the current directory
    of the moment at which the server was made."""

    work = "search.probe.worker.measure:work"

    def __init__(self, model: Model | None = None, modules: Sequence[str] = STEP_MODULES) -> None:
        library = library_modules(str(getattr(model, "library", "")))
        # torch.cuda.is_available() then asks NVML; otherwise it would initialise CUDA.
        environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **probe_environment()}
        super().__init__([*modules, *library], environment)


THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
# Rounds in which a thread of GNU's OpenMP waits for the others before it sleeps: a few tenths of a
# millisecond in place of several (300,000, libgomp's manual), in which it keeps the processor from
# the very thread it waits for where other programs run too. Measured: a step of one image of Swin-T
# took 20 to 43 s on two cores with eight busy programs, and 5 s with this (torch 2.13, 2026-11-26).
# More than torch takes between two kernels, so that threads of a quiet machine should not sleep: a
# judgement.
SPINS, SPIN_ROUNDS = "GOMP_SPINCOUNT", 10_000
_WAIT_POLICY = "OMP_WAIT_POLICY"
# The most that torch would start (2.9 to 2.13: torch/_inductor/config.py).
_MAX_THREADS = 32
# The host memory of one compile worker (torch, Triton, LLVM): an assumption.
_WORKER_BYTES = 512 * MIB
# Compile workers get one of so many parts of the free memory; the probe and the tuner need the
# rest.
_WORKERS_PART = 2


def probe_environment() -> dict[str, str]:
    """The environment of the fork server, and so of its workers.

    torch starts a compile worker for every core it may run on. It sees neither a container's share
    of the cores nor its memory, and when that runs out the kernel may kill the tuner. A number of
    compile workers, or a wait policy of threads, that the environment names stays.
    """
    environment = worker_environment()
    if _WAIT_POLICY not in environment:
        environment.setdefault(SPINS, str(SPIN_ROUNDS))
    if THREADS not in environment:
        environment[THREADS] = str(compile_threads())
    return environment


def compile_threads() -> int:
    """As many compile workers as there are cores and memory for, one at least."""
    cores = math.ceil(read_host().cpus)
    memory = memory_in_use("cpu")
    room = memory.free_bytes // _WORKERS_PART // _WORKER_BYTES if memory is not None else cores
    return max(1, min(_MAX_THREADS, cores, room))


def rank_threads(num_ranks: int) -> int:
    """CPU threads for each of several ranks: as many as OMP_NUM_THREADS names, else an equal share
    of the cores, one at least."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0:
        return int(threads)
    return max(1, math.ceil(read_host().cpus) // num_ranks)


def world_notes(devices: Sequence[str]) -> list[str]:
    """Notes on how several ranks are measured, and what they share."""
    if len(devices) == 1:
        return []
    num, threads = len(devices), rank_threads(len(devices))
    notes = [
        f"Each probe is {num} ranks: its memory is the fullest's, its time the slowest's, and "
        f"rates in tables are one device's. Each rank computes with {threads} "
        f"thread{'s' * (threads > 1)} of the CPU."
    ]
    names = sorted({describe_device(device).name for device in devices})
    if len(names) > 1:
        notes.append(f"The GPUs differ ({', '.join(names)}): all wait for the slowest.")
    if devices[0] == "cpu":
        notes.append("Ranks on the CPU are a rehearsal: they share its cores, and gloo is no NCCL.")
    return notes
