"""The tuner's side of workers: starts them, listens, holds them to one deadline, ends them together
and judges their end once.

A probe has one worker, or one for each rank of a world; one supervisor sees to it that nothing is
left of them, however they or the tuner end. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from pydantic import ValidationError

from planner.core import failures
from planner.core.schema import ProbeStatus
from planner.machine.forking import ForkServer, Workers
from search.probe import failure
from search.probe.protocol import ANSWERS, OutcomeMessage, ProgressMessage, WorkOrder

WORK = "search.probe.worker.worker:work"
# A rank that lost another says so within a moment; that one's own end may take longer to be told
# (a stack to print, a core to write). So long it is waited for.
CAUSE_SECONDS = 5.0
# What is kept of a worker's standard error.
TAIL_BYTES = 16 * 1024
# Of which so much is read this often at least: a pipe holds 64 KiB.
_READ_BYTES, _NUM_READS, _READ_SECONDS = 1 << 16, 16, 0.25
# The phases of a probe, in which a rank that hangs is behind those that wait for it.
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
    outcome: OutcomeMessage | None = None

    def read_errors(self) -> None:
        """What there is, but no more than so many times: somebody may write for ever."""
        with suppress(BlockingIOError):
            for _ in range(_NUM_READS):
                self.errors = (self.errors + os.read(self.errors_fd, _READ_BYTES))[-TAIL_BYTES:]


class Attendance:
    """One worker for each of `orders`, forked from `server`, until it and all that it started have
    ended. `hear` is told where the first is."""

    def __init__(
        self, orders: Sequence[WorkOrder], deadline_seconds: float, server: ForkServer,
        hear: Callable[[ProgressMessage], None],
    ) -> None:  # fmt: skip
        self.orders, self.server, self.hear = orders, server, hear
        self.deadline_seconds = deadline_seconds
        self.is_world = orders[0].place is not None
        self.failed: dict[int, OutcomeMessage] = {}  # in the order in which it was heard
        self.has_ended = False  # for certain
        self.kernel_kills = failure.count_kernel_kills()

    def run(self, on_measured: Callable[[Sequence[OutcomeMessage]], None]) -> list[OutcomeMessage]:
        """What each worker measured, which `on_measured` is told before they end; where one has
        failed, how, and nothing else."""
        with _pipes(len(self.orders)) as (reading, writing):
            self.ranks = [_Rank(fd) for fd in reading]
            given = [order.model_dump_json() for order in self.orders]
            with self.server.fork(WORK, given, writing) as workers:
                outcomes = self._attend(workers)
                if outcomes[0].status == "measured":
                    on_measured(outcomes)
            self.has_ended = workers.are_gone
        return outcomes

    def _attend(self, workers: Workers) -> list[OutcomeMessage]:
        limit = self.orders[0].deadline
        while not (self._is_decided() or workers.are_gone):
            left = max(0.0, limit - time.monotonic())
            said = workers.hear(min(left, _READ_SECONDS))
            for rank in self.ranks:
                rank.read_errors()
            if said:
                self._hear(said)
            elif not left:
                break
            if self.failed:
                limit = min(limit, time.monotonic() + CAUSE_SECONDS)
        for number in range(len(self.ranks) if workers.are_gone else 0):
            self._settle(number, self._judge(number, None))
        if self.failed:
            return [self._blame()]
        found = [rank.outcome for rank in self.ranks if rank.outcome is not None]
        return found if len(found) == len(self.ranks) else [self._late()]

    def _hear(self, said: bytes) -> None:
        if said.startswith(b"ended"):
            wait_status, number = map(int, said.split()[1:])
            self._settle(number, self._judge(number, wait_status))
            return
        try:
            answer = ANSWERS.validate_json(said)
        except ValidationError:  # the model's own code has written it
            return
        if isinstance(answer, OutcomeMessage):
            self._settle(answer.rank, answer)
            return
        self.ranks[answer.rank].phase = answer.phase
        if answer.rank == 0:
            self.hear(answer)

    def _settle(self, number: int, outcome: OutcomeMessage) -> None:
        """Its first word counts."""
        if self.ranks[number].outcome is None:
            self.ranks[number].outcome = outcome
            if outcome.status != "measured":
                self.failed[number] = outcome

    def _judge(self, number: int, wait_status: int | None) -> OutcomeMessage:
        """The outcome of one that has ended without any."""
        rank = self.ranks[number]
        rank.read_errors()
        errors = rank.errors.decode(errors="replace")
        status: ProbeStatus = "crashed"
        message = "its supervisor was ended from outside"
        if wait_status is not None:
            words = failure.last_words(errors)
            status, message = failure.judge_death(wait_status, words, self.kernel_kills)
        lost = failures.is_lost_peer(errors)
        return OutcomeMessage(status=status, message=message, phase=rank.phase, lost_others=lost)

    def _is_decided(self) -> bool:
        """Whether one failed by itself, or all have measured. One that failed for others' sake
        decides nothing yet."""
        return self._cause() is not None or all(
            rank.outcome is not None and rank.outcome.status == "measured" for rank in self.ranks
        )

    def _cause(self) -> int | None:
        return next((n for n, outcome in self.failed.items() if not outcome.lost_others), None)

    def _blame(self) -> OutcomeMessage:
        """What ended the probe: the first that failed by itself, else the first that lost others,
        of which none has said why."""
        cause = self._cause()
        number = next(iter(self.failed)) if cause is None else cause
        outcome = self.failed[number]
        if not self.is_world:
            return outcome
        said = f"rank {number} of {len(self.ranks)}: {outcome.message}"
        return outcome.model_copy(update={"message": said})

    def _late(self) -> OutcomeMessage:
        """Where each was at the deadline; the probe's phase is that of the one behind."""
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
        return OutcomeMessage(status="timed_out", phase=next(iter(by_phase)), message=message)


def _position(phase: str) -> int:
    return _PHASES.index(phase) if phase in _PHASES else len(_PHASES)


@contextmanager
def _pipes(number: int) -> Iterator[tuple[list[int], list[int]]]:
    """The ends of so many pipes; nobody waits to read."""
    pairs = [os.pipe() for _ in range(number)]
    try:
        for reading, _ in pairs:
            os.set_blocking(reading, False)
        yield [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    finally:
        for fd in (fd for pair in pairs for fd in pair):
            os.close(fd)
