"""One tuner at work on a study: asks a strategy, claims, probes, records, until it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from planner.schema import MeasurementRecord
from planner.schema.record import BUDGET_ENDED
from search.probe.evidence import is_feasible
from search.replay import Replay
from search.space import Candidate, Space
from search.strategies.strategy import Choice, Situation, Strategy
from search.study.study import Claim
from search.surrogate.broken_parts import is_plain

SAME_FAILURES = 3
PLAIN_BATCH = 8  # images, of the plain setting that is tried after those: it should fit
# In a row, for what other processes hold or took of the device: then it is not ours to measure on.
MAX_CROWDED = 3
MAX_TRIES = 2  # of one setting in one run, where others crowded it out
LEAST_SECONDS = 1.0  # of a deadline: what has just begun can at least be ended in order
MAX_LOST_CLAIMS = 20  # in a row, to other tuners: then their study is left to them


class Prober(Protocol):
    """Runs one probe to its end, whatever that is, within `deadline_seconds`."""

    def __call__(
        self, choice: Choice, probe_id: str, deadline_seconds: float
    ) -> MeasurementRecord: ...


@dataclass(frozen=True)
class Progress:
    """What a person sees. `kind` is note, start, step or end; `record` is there at an end.
    Rates in images/s, times in seconds; `probe` counts from 1, `num_probes` None is no limit."""

    kind: str
    text: str = ""
    phase: str = ""
    candidate: Candidate | None = None
    probe: int = 0
    num_probes: int | None = None
    best_rate: float | None = None
    seconds_left: float | None = None
    step_seconds: float | None = None
    record: MeasurementRecord | None = None


OnProgress = Callable[[Progress], None]


@dataclass
class Limits:
    """What a search may use: probes in the whole study, and seconds by `clock`. `spent_seconds` is
    what the study had taken before this tuner began, `reserved_seconds` what is kept for the
    baseline."""

    trials: int | None = None
    budget_seconds: float | None = None
    spent_seconds: float = 0.0
    reserved_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.started = self.clock()

    def seconds_left(self) -> float | None:
        """Seconds in which probes may be begun; None is no limit."""
        left = self.seconds_to_end()
        return None if left is None else max(left - self.reserved_seconds, 0.0)

    def seconds_to_end(self) -> float | None:
        """Seconds until all has to be over; None is never."""
        if self.budget_seconds is None:
            return None
        used = self.clock() - self.started + self.spent_seconds
        return max(self.budget_seconds - used, 0.0)


class Book(Protocol):
    """Where probes are claimed and kept: a study on disk, or a replay's in memory."""

    def records(self) -> tuple[MeasurementRecord, ...]: ...

    def busy(self) -> set[str]: ...

    def claim(
        self, candidate: Candidate, lease_seconds: float, repeat: int = 0
    ) -> Claim | None: ...

    def finish(self, claim: Claim, record: MeasurementRecord) -> MeasurementRecord: ...

    def release(self, claim: Claim, why: str) -> None: ...


class ReplayBook:
    """The book of a replay: nobody else is there and nothing need survive."""

    def __init__(self) -> None:
        self.kept: list[MeasurementRecord] = []

    def records(self) -> tuple[MeasurementRecord, ...]:
        return tuple(self.kept)

    def busy(self) -> set[str]:
        return set()

    def claim(self, candidate: Candidate, lease_seconds: float, repeat: int = 0) -> Claim | None:
        return Claim(candidate, f"replay-{len(self.kept)}", len(self.kept))

    def finish(self, claim: Claim, record: MeasurementRecord) -> MeasurementRecord:
        record = record.model_copy(update={"probe_id": claim.probe_id})
        self.kept.append(record)
        return record

    def release(self, claim: Claim, why: str) -> None:
        return None


class ReplayProber:
    """A prober over a recorded table that charges recorded seconds to the limits."""

    def __init__(self, replay: Replay, limits: Limits) -> None:
        self.replay = replay
        self.limits = limits

    def __call__(self, choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        record = self.replay.probe(choice.candidate)
        end = self.limits.seconds_to_end()
        if end is not None and record.probe_seconds > end:  # a device's would have been cut short
            ended = {"status": "timed_out", "step_seconds": (), "images_per_second": None,
                     "compile_seconds": None, "probe_seconds": end,
                     "flags": (BUDGET_ENDED,)}  # fmt: skip
            record = record.model_copy(update=ended)
        self.limits.spent_seconds += record.probe_seconds
        return record


class Session:
    """The loop. `records` is all that is known, by any tuner, in the order it was learned."""

    def __init__(
        self, space: Space, book: Book, prober: Prober, limits: Limits,
        deadline: Callable[[Choice], float], budget_bytes: int | None,
        on_progress: OnProgress = lambda progress: None,
    ) -> None:  # fmt: skip
        self.space, self.book, self.prober, self.limits = space, book, prober, limits
        self.deadline, self.budget_bytes, self.on_progress = deadline, budget_bytes, on_progress
        self.records: list[MeasurementRecord] = []
        self.seen: set[str] = set()
        self.crowded: list[str] = []  # settings that others crowded out in this run, one per probe
        self.num_crowded = 0  # in a row

    def run(self, strategy: Strategy) -> str:
        """Probes until the strategy or a limit ends it. Returns why it ended."""
        lost = 0
        told: set[str] = set()
        while True:
            self._catch_up(strategy, told)
            if self.limits.trials is not None and len(self.records) >= self.limits.trials:
                return f"--trials {self.limits.trials} allowed no more probes"
            busy = self.book.busy() | self._crowded_out()
            choice = self._plain_choice(busy) if self._fails_alike() else None
            choice = choice or strategy.ask(Situation(self.limits.seconds_left(), busy))
            if choice is None:
                return strategy.stopped_because
            if self.limits.seconds_left() == 0:
                return "the budget has ended"
            lost = 0 if self._probe(choice) else lost + 1
            if self._fails_alike() and self._plain_choice(busy) is None:
                return f"the first {len(self.in_space())} probes failed alike"
            if self.num_crowded >= MAX_CROWDED:
                return (
                    "other processes took the device's memory: free it, and run the same command "
                    "to go on"
                )
            if lost > MAX_LOST_CLAIMS:
                return "other tuners took every probe that was worth making"

    def _crowded_out(self) -> set[str]:
        """Settings that are left for another run: here others took their memory every time."""
        return {c for c in self.crowded if self.crowded.count(c) >= MAX_TRIES}

    def _catch_up(self, strategy: Strategy, told: set[str]) -> None:
        """Tells the strategy what is not in `told`: of resumed studies and of other tuners too."""
        self.hear()
        for record in self.records:
            candidate = self.space.find(record.setting)
            if record.probe_id not in told and candidate is not None:
                told.add(record.probe_id)
                strategy.tell(candidate, record)

    def hear(self) -> None:
        """Takes in what the book has of other tuners, and of this one where it was interrupted."""
        for record in self.book.records():
            if record.probe_id not in self.seen:
                self.seen.add(record.probe_id)
                self.records.append(record.judged_in(self.budget_bytes))

    def _probe(self, choice: Choice) -> bool:
        """One probe, from claim to record; False where another tuner had claimed it."""
        deadline, cut = self._deadline(choice)
        repeat = sum(r.setting == choice.candidate.setting for r in self.records)
        claim = self.book.claim(choice.candidate, deadline, repeat)
        if claim is None:
            return False
        self._report("start", choice)
        try:
            record = self.prober(choice, claim.probe_id, deadline)
        except BaseException as error:
            self.book.release(claim, f"stopped by {type(error).__name__}")
            raise
        if cut and record.status == "timed_out" and not record.cut_short:
            record = record.model_copy(update={"flags": (*record.flags, BUDGET_ENDED)})
        record = record.judged_in(self.budget_bytes)
        crowded = record.inconclusive and not record.cut_short
        self.num_crowded = self.num_crowded + 1 if crowded else 0
        if crowded:
            self.crowded.append(choice.candidate.id)
        self._keep(claim, record)
        self._report("end", choice, record)
        return True

    def _deadline(self, choice: Choice) -> tuple[float, bool]:
        """Seconds a probe may take, and whether it is the budget that sets them."""
        hung, end = self.deadline(choice), self.limits.seconds_to_end()
        if end is None or end >= hung:
            return hung, False
        return max(end, LEAST_SECONDS), True

    def _keep(self, claim: Claim, record: MeasurementRecord) -> None:
        """In memory first: what was measured counts even where the disk refuses it."""
        record = record.model_copy(update={"probe_id": claim.probe_id})
        self.seen.add(record.probe_id)
        self.records.append(record)
        self.book.finish(claim, record)

    def _fails_alike(self) -> bool:
        """Whether nothing but one and the same crash was seen, or one and the same refusal (of a
        library that is missing)."""
        records = self.in_space()
        ends = {(r.status, r.message) for r in records}
        only = ends.pop() if len(ends) == 1 else ("", "")
        return only[0] in ("crashed", "unsupported") and len(records) >= SAME_FAILURES

    def _plain_choice(self, busy: set[str]) -> Choice | None:
        """A setting that needs nothing of the machine, where none was tried: what refuses it too
        has nothing to do with the settings, and what does not (a compiler is missing, a fused
        optimizer is broken) should not end a search that can still find the best of the rest."""
        if any(is_plain(r.setting) for r in self.in_space()):
            return None
        plain = [c for c in self.space.candidates if is_plain(c.setting) and c.id not in busy]
        small = [c for c in plain if c.setting.batch_size <= PLAIN_BATCH]
        # Candidates are in order of simplicity, and of those alike the largest says most.
        first = next((c.arm for c in small or plain), None)
        arm = [c for c in small or plain if c.arm == first]
        return Choice(arm[-1] if small else arm[0], "calibrate") if arm else None

    def in_space(self) -> list[MeasurementRecord]:
        """The records of settings that are searched now: a study may have others of a wider search,
        which count against its limits and nothing else."""
        return [r for r in self.records if self.space.find(r.setting) is not None]

    def best_rate(self) -> float | None:
        rates = [r.images_per_second for r in self.in_space() if is_feasible(r, self.budget_bytes)]
        return max((r for r in rates if r is not None), default=None)

    def _report(self, kind: str, choice: Choice, record: MeasurementRecord | None = None) -> None:
        self.on_progress(
            Progress(
                kind=kind,
                phase=choice.phase,
                candidate=choice.candidate,
                probe=len(self.records) + (kind == "start"),
                num_probes=self.limits.trials,
                best_rate=self.best_rate(),
                seconds_left=self.limits.seconds_left(),
                record=record,
            )
        )
