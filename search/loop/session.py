"""One tuner at work on a study: asks a strategy, leases, probes, keeps, until it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from planner.core.errors import ContractError, PlannerError
from planner.core.schema import MeasurementRecord
from planner.core.schema.record import BUDGET_ENDED, Expected
from search.loop.interrupts import ending, hold
from search.loop.limits import Limits
from search.loop.prober import Prober
from search.loop.progress import OnProgress, Progress
from search.loop.space import Candidate, Space
from search.loop.strategies.strategy import Choice, Situation, Strategy
from search.loop.study.lease import Lease
from search.loop.study.records import RecordsNotWrittenError
from search.loop.study.study import Study
from search.loop.surrogate.broken_parts import is_plain
from search.probe.evidence import is_feasible
from search.probe.failure import broke_contract

SAME_FAILURES = 3
NUMERIC_AXES = ("precision", "attention")  # what a machine may break for every setting that has it
PLAIN_BATCH = 8  # images, of the plain setting that is tried after those: it should fit
# In a row, for what other processes hold or took of the device: then it is not ours to measure on.
MAX_CROWDED = 3
MAX_LOST = 2  # probes in a row, on a device that does not answer: the second try tells a hiccup
MAX_TRIES = 2  # of one setting in one run, where others crowded it out
LEAST_SECONDS = 1.0  # the shortest deadline, so that a probe can still end in order
SHORTEST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds between looks at what others are probing
BUDGET_ENDED_HERE = "the budget has ended"
MAX_LOST_LEASES = 20  # in a row, to other tuners: then their study is left to them


class Session:
    """One tuner's loop over a study: asks a strategy, leases, probes, keeps, until it is done.

    `records` is all that is known, by any tuner, in the order it was learned. `expect` says what is
    expected of a probe, for its record; `listen` is told of every record, as the strategy is.
    """

    expect: Callable[[Candidate, str], Expected | None]
    listen: Callable[[Candidate, MeasurementRecord], None]

    def __init__(
        self, space: Space, study: Study,
        prober: Prober, limits: Limits,
        deadline: Callable[[Choice], float], budget_bytes: int | None,
        on_progress: OnProgress = lambda progress: None,
        plain: Callable[[Any], bool] = is_plain,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self.space, self.study, self.prober, self.limits = space, study, prober, limits
        self.deadline, self.budget_bytes, self.on_progress = deadline, budget_bytes, on_progress
        self.plain, self.sleep = plain, sleep
        self.expect = lambda candidate, phase: None
        self.listen = lambda candidate, record: None
        self.records: list[MeasurementRecord] = []
        self.seen: set[str] = set()
        self.crowded: list[str] = []  # settings that others crowded out in this run, one per probe
        self.num_crowded = 0  # in a row
        self.has_waited = False

    def run(self, strategy: Strategy) -> str:
        """Probes until the strategy or a limit ends it, and no other tuner of the study is at a
        probe of this search: what that finds may change what is worth probing, and all are to
        recommend from the same probes. Returns why it ended."""
        lost = 0
        told: set[str] = set()
        last: set[str] | None = None  # what others were at when a limit was reached
        while True:
            others = self.study.busy()  # before the records: what ends meanwhile is in both
            self._catch_up(strategy, told)
            busy = others | self._crowded_out()
            choice, stopped = self._next(strategy, others, busy)
            if choice is None:
                awaited = self._in_search(others)
                if stopped in (self._no_more_trials(), BUDGET_ENDED_HERE):
                    last = awaited = awaited if last is None else awaited & last
                if not awaited:
                    return stopped
                self._await(awaited)
                continue
            lost = 0 if self._probe(choice) else lost + 1
            if self._fails_alike() and self._plain_choice(busy) is None:
                return f"the first {len(self.in_space())} probes failed alike"
            if self.num_crowded >= MAX_CROWDED:
                return (
                    "other processes took the device's memory: free it, and run the same command "
                    "to go on"
                )
            if self._device_is_lost():
                return "the device does not answer any more"
            if lost > MAX_LOST_LEASES:
                return "other tuners took every probe that was worth making"

    def _next(
        self, strategy: Strategy, others: set[str], busy: set[str]
    ) -> tuple[Choice | None, str]:
        """What to probe next, or why nothing."""
        trials = self.limits.trials
        if trials is not None and len(self.records) + len(others) >= trials:
            return None, self._no_more_trials()
        choice = self._plain_choice(busy) if self._fails_alike() else None
        choice = choice or strategy.ask(Situation(self.limits.seconds_left(), busy))
        if choice is None:
            return None, strategy.stopped_because
        if self.limits.seconds_left() == 0:
            return None, BUDGET_ENDED_HERE
        return choice, ""

    def _no_more_trials(self) -> str:
        return f"--trials {self.limits.trials} allowed no more probes"

    def _in_search(self, settings: set[str]) -> set[str]:
        """Those that are searched here: a study may be shared by searches of other settings."""
        return {c.id for c in self.space.candidates if c.id in settings}

    def _await(self, probes: set[str]) -> None:
        """Until one of these probes of other tuners ends, or the lease of a lost one does."""
        if not self.has_waited:
            self.note("Waiting for what other tuners of this study are probing.")
            self.has_waited = True
        pause = SHORTEST_PAUSE
        while probes <= self.study.busy():
            self.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def run_to_end(self, probe: Callable[[], str]) -> tuple[str, list[str]]:
        """Runs `probe`, which returns why it ended. Ctrl-C ends it early, and so does a disk that
        is full: what was measured until then counts. Returns why it ended, and what is to be said
        of that; from then on no signal is heard."""
        notes: list[str] = []
        try:
            stopped = probe()
            hold()
            self._agree()
        except KeyboardInterrupt:
            stopped = ending()
            notes += self._save()
        except PlannerError as error:
            if not self.records:
                raise
            stopped = "what was measured could not be kept"
            if not isinstance(error, RecordsNotWrittenError):
                stopped = error.message
            notes.append(str(error))
        hold()
        return stopped, notes

    def _agree(self) -> None:
        """The records of all tuners, in one order for all, on this machine's disk too."""
        self.hear()
        kept = self.study.records()
        order = {record.probe_id: at for at, record in enumerate(kept)}
        self.records.sort(key=lambda record: order.get(record.probe_id, len(order)))
        self.study.save(kept)

    def _save(self) -> list[str]:
        """An interrupt may have come between a probe's end and its line on disk."""
        try:
            self.hear()
            self.study.save(self.records)
        except PlannerError as error:
            return [str(error)]
        return []

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
                self.listen(candidate, record)
                strategy.tell(candidate, record)

    def hear(self) -> None:
        """Takes in what the study has of other tuners, and of this one where it was interrupted."""
        fresh = [r for r in self.study.records() if r.probe_id not in self.seen]
        self.limits.charge(fresh)
        for record in fresh:
            self._learn(record.judged_in(self.budget_bytes))

    def _probe(self, choice: Choice) -> bool:
        """One probe, from lease to record; False where another tuner holds the lease.

        Raises ContractError where the task, and no setting, is what fails: nothing is kept of it.
        """
        deadline, cut = self._deadline(choice)
        repeat = sum(r.setting == choice.candidate.setting for r in self.records)
        lease = self.study.lease(choice.candidate, deadline, repeat, self.limits.trials)
        if lease is None:
            return False
        self._report("start", choice, deadline_seconds=deadline)
        try:
            record = self.prober(choice, lease.probe_id, deadline)
        except BaseException as error:
            self.study.release(lease, f"stopped by {type(error).__name__}")
            raise
        if broke_contract(record) and self.best() is None:
            # The next run, with the task mended, is to begin where this one did.
            self.study.release(lease, record.message)
            raise ContractError(*record.message.split("\n", 1))
        if cut and record.status == "timed_out" and not record.cut_short:
            record = record.model_copy(update={"flags": (*record.flags, BUDGET_ENDED)})
        expected = self.expect(choice.candidate, choice.phase)
        record = record.judged_in(self.budget_bytes).model_copy(
            # The one place: a prober need not know of studies, and a table's record may hold what
            # another search expected.
            update={"probe_id": lease.probe_id, "expected": expected}
        )
        crowded = record.inconclusive and not record.cut_short and not record.lost_device
        self.num_crowded = self.num_crowded + 1 if crowded else 0
        if crowded:
            self.crowded.append(choice.candidate.id)
        self._keep(lease, record)
        self._report("end", choice, record=record)
        return True

    def _deadline(self, choice: Choice) -> tuple[float, bool]:
        """Seconds a probe may take, and whether it is the budget that sets them."""
        hung, end = self.deadline(choice), self.limits.seconds_left()
        if end is None or end >= hung:
            return hung, False
        return max(end, LEAST_SECONDS), True

    def _keep(self, lease: Lease, record: MeasurementRecord) -> None:
        """In memory first: what was measured counts even where the disk refuses it."""
        self._learn(record)
        self.study.finish(lease, record)

    def _learn(self, record: MeasurementRecord) -> None:
        self.seen.add(record.probe_id)
        self.records.append(record)

    def _device_is_lost(self) -> bool:
        last = self.records[-MAX_LOST:]
        return len(last) == MAX_LOST and all(record.lost_device for record in last)

    def _fails_alike(self) -> bool:
        """Whether nothing but one and the same crash was seen, or one and the same refusal (of a
        library that is missing)."""
        records = self.in_space()
        ends = {(r.status, r.message) for r in records}
        only = ends.pop() if len(ends) == 1 else ("", "")
        return only[0] in ("crashed", "unsupported", "faulty") and len(records) >= SAME_FAILURES

    def _plain_choice(self, busy: set[str]) -> Choice | None:
        """A setting that needs nothing of the machine, where none was tried, nor one in a precision
        and an attention of its own: what refuses it too has nothing to do with the settings, and
        what does not (a compiler is missing, bf16 is broken) should not end a search that can
        still find the best of the rest."""
        tried = [r.setting for r in self.in_space()]
        known = [{getattr(s, axis, None) for s in tried} for axis in NUMERIC_AXES]

        def news(candidate: Candidate) -> int:
            values = [getattr(candidate.setting, axis, None) for axis in NUMERIC_AXES]
            return sum(value not in seen for value, seen in zip(values, known, strict=True))

        plain = [c for c in self.space.candidates if self.plain(c.setting) and c.id not in busy]
        most = max(map(news, plain), default=0)
        if not most and any(map(self.plain, tried)):
            return None
        plain = [c for c in plain if news(c) == most]
        small = [c for c in plain if c.setting.batch_size <= PLAIN_BATCH]
        # Candidates are in order of simplicity, and of those alike the largest says most.
        first = next((c.arm for c in small or plain), None)
        arm = [c for c in small or plain if c.arm == first]
        return Choice(arm[-1] if small else arm[0], "calibrate") if arm else None

    def in_space(self) -> list[MeasurementRecord]:
        """The records of settings that are searched now: a study may have others of a wider search,
        which count against its limits and nothing else."""
        return [r for r in self.records if self.space.find(r.setting) is not None]

    def best(self) -> MeasurementRecord | None:
        found = [r for r in self.in_space() if is_feasible(r, self.budget_bytes)]
        return max(found, key=lambda r: r.images_per_second or 0.0, default=None)

    def note(self, text: str) -> None:
        self.on_progress(Progress("note", text))

    def _report(
        self, kind: str, choice: Choice, record: MeasurementRecord | None = None,
        deadline_seconds: float | None = None,
    ) -> None:  # fmt: skip
        self.on_progress(
            Progress(
                kind=kind,
                phase=choice.phase,
                candidate=choice.candidate,
                probe=len(self.records) + (kind == "start"),
                num_probes=self.limits.trials,
                best=self.best(),
                seconds_left=self.limits.seconds_left(),
                deadline_seconds=deadline_seconds,
                record=record,
            )
        )
