"""The ranks of one probe: started together, held to one deadline, ended together, judged once.

Each rank is a worker with a supervisor of its own, as the worker of any probe: so nothing is left
of it, however it or the tuner ends. torchrun's agent would be one more process to lose, and its
workers outlive it where it is killed.

Ranks find each other by a file that only lives in the tuner's memory: no port that somebody else
may take, nothing to delete.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from planner.schema import TrainSetting
from search.probe import failure
from search.probe.parent.attendance import (
    EXIT_SECONDS,
    Listener,
    Spawn,
    WorkerGroup,
    judge_silence,
)
from search.probe.parent.environment import rank_threads
from search.probe.parent.ranks import put_together, shared_flags
from search.probe.protocol import (
    AnswerReader,
    OutcomeMessage,
    ProbeAnswer,
    ProbeRequest,
    RankPlace,
    WorkOrder,
)

# A rank that lost another says so within a moment; that one's own end may take longer to be told
# (a stack to print, a core to write). So long it is waited for.
CAUSE_SECONDS = 5.0
# The phases of a probe, in which a rank that hangs is behind those that wait for it.
_PHASES = (
    "start", "import", "device", "join", "build", "compile", "forward", "backward", "optimizer",
    "zero_grad", "warm-up", "measure", "check",
)  # fmt: skip

Hear = Callable[[int, ProbeAnswer], None]


def devices_of(request: ProbeRequest) -> tuple[str, ...]:
    return rank_devices(request.device, request.setting)


def rank_devices(device: str, setting: TrainSetting) -> tuple[str, ...]:
    """The device of each rank: for GPUs one after the other, from `device` on."""
    if setting.parallelism == "none":
        return (device,)
    size = setting.world_size
    if device == "cpu":
        return ("cpu",) * size
    first = int(device[5:])
    return tuple(f"cuda:{first + rank}" for rank in range(size))


@dataclass
class Rank:
    """One rank: its worker, and how it ended, once that is known."""

    number: int
    group: WorkerGroup
    kernel_kills: int | None
    outcome: OutcomeMessage | None = None

    @property
    def phase(self) -> str:
        return self.group.listener.phase

    def look(self, probe_id: str) -> None:
        """Judges the end of a worker that said nothing more."""
        if self.outcome is not None or self.group.is_running():
            return
        self.group.drain()  # its last word may lie in the pipe
        if self.outcome is None:
            listener = self.group.listener
            silence = judge_silence(listener, 0.0, self.kernel_kills)
            self.outcome = OutcomeMessage(
                probe_id=probe_id, status=silence.status, message=silence.message,
                phase=listener.phase, lost_others=failure.is_lost_peer(listener.stderr.text()),
            )  # fmt: skip


@dataclass
class WorldProbe:
    """A probe over as many ranks as its setting has devices. `hear` is told what they say until
    they end, `on_outcome` what they measured, as soon as all have."""

    request: ProbeRequest
    spawn: Spawn
    hear: Hear
    on_outcome: Callable[[OutcomeMessage], None]
    ranks: list[Rank] = field(default_factory=list)
    failed: list[Rank] = field(default_factory=list)  # in the order in which it was heard

    def run(self, deadline: float, deadline_seconds: float) -> OutcomeMessage:
        """What the ranks measured together; where one has failed, how, and no rank is left."""
        with ExitStack() as stack:
            store = stack.enter_context(_shared_file())
            try:
                self._start(stack, store, deadline)
                found = self._attend(deadline, deadline_seconds)
            finally:
                for rank in self.ranks:
                    rank.group.kill()
        told = shared_flags([rank.group.listener.all_flags for rank in self.ranks])
        return found.model_copy(update={"flags": (*found.flags, *told)})

    @property
    def has_ended(self) -> bool:
        """Whether every rank is known to have ended."""
        return all(rank.group.listener.wait_status is not None for rank in self.ranks)

    def _start(self, stack: ExitStack, store: str, deadline: float) -> None:
        devices = devices_of(self.request)
        threads = rank_threads(len(devices))
        kernel_kills = failure.count_kernel_kills()
        for number, device in enumerate(devices):
            group = stack.enter_context(WorkerGroup.start(self.spawn, self._listener(number)))
            self.ranks.append(Rank(number, group, kernel_kills))
            group.order(
                WorkOrder(
                    request=self.request.model_copy(update={"device": device}),
                    deadline_seconds=deadline - time.monotonic(),
                    place=RankPlace(rank=number, store=store, threads=threads),
                )
            )

    def _listener(self, number: int) -> Listener[ProbeAnswer]:
        def hear(answer: ProbeAnswer) -> None:
            if isinstance(answer, OutcomeMessage):
                self.ranks[number].outcome = answer
            else:
                self.hear(number, answer)

        reader = AnswerReader(self.request.probe_id)
        return Listener(reader, hear)

    def _attend(self, deadline: float, deadline_seconds: float) -> OutcomeMessage:
        """Listens to all until they have measured, one has failed, or they are late."""
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(rank.group.selector, selectors.EVENT_READ, rank)  # type: ignore[arg-type]
            limit = deadline
            while not self._is_decided() and time.monotonic() < limit:
                self._listen(selector, limit)
                if self.failed:
                    limit = min(limit, time.monotonic() + CAUSE_SECONDS)
            if self.failed:
                return self._blame()
            if self._all_measured():
                found = self._put_together()
                for rank in self.ranks:
                    rank.group.dismiss()
            else:
                found = self._late(deadline_seconds)
                for rank in self.ranks:
                    rank.group.ask_to_end()
            self._wait(selector)
        return found

    def _listen(self, selector: selectors.BaseSelector, limit: float) -> None:
        for key, _ in selector.select(max(0.0, limit - time.monotonic())):
            key.data.group.listen(0)
        for rank in self.ranks:
            rank.look(self.request.probe_id)
            outcome = rank.outcome
            if outcome is not None and outcome.status != "measured" and rank not in self.failed:
                self.failed.append(rank)

    def _is_decided(self) -> bool:
        """Whether a rank failed by itself, or all have measured. One that failed for others' sake
        decides nothing yet."""
        return self._cause() is not None or self._all_measured()

    def _all_measured(self) -> bool:
        return all(r.outcome is not None and r.outcome.status == "measured" for r in self.ranks)

    def _cause(self) -> Rank | None:
        return next((r for r in self.failed if r.outcome and not r.outcome.lost_others), None)

    def _blame(self) -> OutcomeMessage:
        """What ended the probe: the first rank that failed by itself, else the first that lost
        others, of which none has said why."""
        rank = self._cause() or self.failed[0]
        assert rank.outcome is not None, "it has failed"
        said = f"rank {rank.number} of {len(self.ranks)}: {rank.outcome.message}"
        return rank.outcome.model_copy(update={"message": said})

    def _put_together(self) -> OutcomeMessage:
        outcomes = [rank.outcome for rank in self.ranks if rank.outcome is not None]
        found = put_together(outcomes, devices_of(self.request))
        self.on_outcome(found)
        return found

    def _late(self, deadline_seconds: float) -> OutcomeMessage:
        """Where each rank was at the deadline; the probe's phase is that of the rank behind."""
        by_phase: dict[str, list[str]] = {}
        for rank in sorted(self.ranks, key=lambda r: _order(r.phase)):
            by_phase.setdefault(rank.phase, []).append(str(rank.number))
        where = "; ".join(
            f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)} in {phase}"
            for phase, numbers in by_phase.items()
        )
        return OutcomeMessage(
            probe_id=self.request.probe_id,
            status="timed_out",
            message=f"not done after {deadline_seconds:g} s: {where}",
            phase=next(iter(by_phase)),
        )

    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Until all have ended, or the time for that is over."""
        limit = time.monotonic() + EXIT_SECONDS
        while any(r.group.is_running() for r in self.ranks) and time.monotonic() < limit:
            for key, _ in selector.select(max(0.0, limit - time.monotonic())):
                key.data.group.listen(0)


def _order(phase: str) -> int:
    return _PHASES.index(phase) if phase in _PHASES else len(_PHASES)


@contextmanager
def _shared_file() -> Iterator[str]:
    """The path of a file in memory that this machine's processes of ours can open, and that is gone
    with this one."""
    descriptor = os.memfd_create("planner-world")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
