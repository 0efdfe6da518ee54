"""One tuner's search: Optuna runs the loop, the sampler chooses, and each trial is a probe; and the
limits that end it."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from planner.core.errors import ContractError, PlannerError
from planner.core.schema import MeasurementRecord, Model, SwinConfig, TrainSetting
from planner.core.schema.record import BUDGET_ENDED, Recommendation
from planner.libraries.names import find_library
from search.loop.options import SearchOptions
from search.loop.prober import OnProgress, Prober, Progress, ProgressKind
from search.loop.recommendation import Summary, recommend
from search.loop.records import RecordsNotWrittenError
from search.loop.sampler import PlannerSampler
from search.loop.signals import ending, interruptible
from search.loop.space import AXES, Candidate, Pick, Space, candidate, setting_id
from search.loop.study import ProbeStudy, StudyIdentity, storage_faults
from search.loop.surrogate.posterior import Posterior, needs_nothing_special
from search.loop.surrogate.prior import Prior, compilation_of
from search.probe.evidence import is_feasible
from search.probe.protocol import broke_contract

SAME_FAILURES = 3
NUMERIC_AXES = ("precision", "attention")  # a machine may break a value for every setting with it
# So many probes in a row fail because of other processes' memory: then nothing can be measured.
MAX_CROWDED = 3
MAX_LOST = 2  # probes in a row on a device that does not answer: once may be a hiccup
MAX_TRIES = 2  # of one setting in one run, where others took its memory
LEAST_PROBE_SECONDS = 1.0  # the shortest deadline, so that a probe can still end in order
SHORTEST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds between looks at what other tuners probe
# A probe hangs if it takes longer than this, twice its steps (at most an hour of them) and five
# times the guess of compiling. The factors are judgements. Imports and building took under a minute
# on the slowest machine seen, and timing takes at most one.
PROBE_START_SECONDS = 180.0
STEPS_TO_WAIT = 8  # two of warm-up, three timed, and some for a guess that is too low


class TakenError(Exception):
    """A trial without a probe: another tuner was first at its setting."""


class Search:
    """One tuner's work on a study. `records` are those of all tuners, in the order in which this
    one learned of them, `made` its own of this run. A prober calls `receive` with what a worker
    measured while its process is still ending."""

    def __init__(
        self, study: ProbeStudy, prior: Prior, prober: Prober, limits: Limits,
        options: SearchOptions, plain_arm: str | None = None,
        on_progress: OnProgress = lambda progress: None,
    ) -> None:  # fmt: skip
        self.study, self.prober, self.limits, self.options = study, prober, limits, options
        self.space, self.budget_bytes = study.space, study.budget_bytes
        self.prior, self.plain_arm, self.on_progress = prior, plain_arm, on_progress
        self.sampler = self._sampler()
        self.records: list[MeasurementRecord] = []
        self.made: list[MeasurementRecord] = []
        self.stopped = ""
        self.stamp: Callable[[MeasurementRecord], MeasurementRecord] = lambda record: record

    def _sampler(self) -> PlannerSampler:
        posterior = Posterior(self.space, self.prior, self.budget_bytes)
        return PlannerSampler(
            posterior, self.study.params, self.options.tolerance, self.plain_arm,
            self.limits.seconds_left,
        )  # fmt: skip

    @property
    def best(self) -> MeasurementRecord | None:
        feasible = [r for r in self.in_space() if is_feasible(r, self.budget_bytes)]
        return max(feasible, key=lambda r: r.images_per_second or 0.0, default=None)

    def in_space(self) -> list[MeasurementRecord]:
        """The records of settings of this search. A study may have those of a wider search too,
        which count only against its limits."""
        return [r for r in self.records if self.space.find(r.setting) is not None]

    def run(self) -> tuple[str, list[str]]:
        """Probes until the sampler or a limit ends the search and no other tuner of the study is
        probing a setting of it, since its record may change what is worth probing. Ctrl-C or a full
        disk end it early; what was measured until then counts. Returns why it ended, and notes."""
        self.study.optuna_study.sampler = self.sampler
        try:
            with storage_faults(self.study.source):
                self._learn()
                self._begin()
                while self._goes_on():
                    self._optimize()
            self._learn()
            self.study.save()
        except KeyboardInterrupt:
            return ending(), []
        except PlannerError as error:
            if not self.records:
                raise
            lost = isinstance(error, RecordsNotWrittenError)
            return "what was measured could not be kept" if lost else error.message, [str(error)]
        return self.stopped, []

    def _begin(self) -> None:
        """Enqueues the setting to begin with, unless it has a record or another tuner has begun or
        enqueued it."""
        first = self.space.first
        if first is None or any(r.setting == first.setting for r in self.records):
            return
        params, states = self.study.params.of(first), (TrialState.WAITING, TrialState.RUNNING)
        begun = self.study.optuna_study.get_trials(deepcopy=False, states=states)
        if all(params != t.system_attrs.get("fixed_params", t.params) for t in begun):
            self.study.optuna_study.enqueue_trial(params)

    def _optimize(self) -> None:
        """Lets Optuna make trials until the search ends. Another tuner may have freed a trial of
        this one, which did not answer for long: its record is kept all the same."""

        def stop(study: optuna.Study, trial: FrozenTrial) -> None:
            if not self._goes_on():
                study.stop()

        try:
            self.study.optuna_study.optimize(self._probe, callbacks=[stop], catch=(TakenError,))
        except ValueError as error:
            if "Cannot tell a" not in str(error):
                raise
            self.study.fill(self.records[-1:])

    def _goes_on(self) -> bool:
        """Whether there is something to probe; else `stopped` says why not. Before that it awaits
        the probes of other tuners, each of which may change it."""
        awaited: set[str] | None = None
        pause = SHORTEST_PAUSE
        while not self._choose(others := self.study.busy()):
            if awaited is not None and self.limits.seconds_left() == 0:
                others &= awaited
            if not others:
                return False
            if awaited is None:
                text = "Waiting for what other tuners of this study are probing."
                self.on_progress(Progress("note", text))
            awaited = others
            with interruptible():
                time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return True

    def _choose(self, others: set[str]) -> bool:
        """Whether the sampler finds another probe, beside those of `others`, after it has learned
        what is new; else `stopped` says why not."""
        self._learn()
        self.stopped, upcoming = self._end(len(others)), None
        if not self.stopped:
            upcoming = self.sampler.choose(others | self._crowded_out())
            self.stopped = "" if upcoming else self.sampler.stopped_because
        self.sampler.upcoming = upcoming
        return upcoming is not None

    def _end(self, num_others: int) -> str:
        """Why no further probe is made, "" where one may be: because of how the last ones ended, or
        of the limits, against which the probes of other tuners count."""
        if self._fails_alike():
            return f"the first {len(self.in_space())} probes failed alike"
        last = self.made[-MAX_CROWDED:]
        if len(last) == MAX_CROWDED and all(map(_was_crowded, last)):
            return (
                "other processes took the device's memory: free it, and run the same command to "
                "go on"
            )
        last = self.made[-MAX_LOST:]
        if len(last) == MAX_LOST and all(record.lost_device for record in last):
            return "the device does not answer any more"
        trials = self.limits.trials
        if trials is not None and len(self.records) + num_others >= trials:
            return f"--trials {trials} allowed no more probes"
        return "the budget has ended" if self.limits.seconds_left() == 0 else ""

    def _fails_alike(self) -> bool:
        """Whether all probes ended in one and the same crash or refusal (a library is missing),
        those of settings that need nothing special, in each precision and attention, among them:
        then no setting will do."""
        records = self.in_space()
        ends = {(r.status, r.message) for r in records}
        status = next(iter(ends))[0] if len(ends) == 1 else ""
        if status not in ("crashed", "unsupported") or len(records) < SAME_FAILURES:
            return False
        undemanding = [c.setting for c in self.space.candidates if needs_nothing_special(c.setting)]
        tried = [r.setting for r in records]
        return not undemanding or (any(map(needs_nothing_special, tried)) and all(
            {getattr(s, axis) for s in undemanding} <= {getattr(s, axis) for s in tried}
            for axis in NUMERIC_AXES
        ))  # fmt: skip

    def _crowded_out(self) -> set[str]:
        """The ids of settings that are left for another run, since others took their memory each
        time."""
        tries = Counter(setting_id(r.setting) for r in self.made if _was_crowded(r))
        return {setting for setting, number in tries.items() if number >= MAX_TRIES}

    def _learn(self) -> None:
        """Adds the study's records that are new here: other tuners', and those of earlier runs."""
        learned = {r.probe_id for r in self.records}
        fresh = [r for r in self.study.records() if r.probe_id not in learned]
        self.limits.charge(fresh)
        for record in fresh:
            self._add(record.judged_in(self.budget_bytes))

    def _add(self, record: MeasurementRecord) -> None:
        self.records.append(record)
        self.sampler.posterior.tell(candidate(record.setting), record)

    def _probe(self, trial: Trial) -> float:
        """Optuna's objective: one probe, in images/s. Raises TrialPruned for a probe without a
        rate, and ContractError, of which nothing is kept, where the task is at fault and no
        setting."""
        suggested = self.study.params.suggest(trial)
        if suggested is None:
            raise TakenError("no setting of this space")
        pick = self._pick(suggested)
        deadline, is_by_budget = self._deadline(pick)
        if not self.study.begin(trial, deadline, self.limits.trials):
            raise TakenError("another tuner was first")
        probe_id = uuid.uuid4().hex
        expected = self.sampler.posterior.expected(suggested, pick.stage)

        def stamp(record: MeasurementRecord) -> MeasurementRecord:
            update = {"probe_id": probe_id, "expected": expected}
            return record.judged_in(self.budget_bytes).model_copy(update=update)

        self.stamp = stamp
        self._report("start", pick, deadline_seconds=deadline)
        try:
            with interruptible():
                record = self.prober(pick, probe_id, deadline)
        except OSError as error:  # this machine's, not the storage's
            raise PlannerError(
                f"no probe can be run: {error.strerror or error}.",
                "Free what is named, and run the same command to go on.",
            ) from error
        if broke_contract(record) and self.best is None:
            # Nothing is kept, so that the next run, with the task mended, begins where this one
            # did.
            law, _, way_out = record.message.partition("\n")
            raise ContractError(law, way_out)
        if is_by_budget and record.status == "timed_out" and not record.cut_short:
            record = record.model_copy(update={"flags": (*record.flags, BUDGET_ENDED)})
        record = stamp(record)
        self.made.append(record)
        self._add(record)  # what was measured counts even where the disk refuses it
        self.study.keep(record)
        self._report("end", pick, record=record)
        return self.study.tell(trial, record)

    def receive(self, record: MeasurementRecord) -> None:
        """Keeps a measurement at once, so that a tuner that is killed while the worker ends loses
        nothing. A file that cannot be written is reported when the probe has ended."""
        with suppress(RecordsNotWrittenError):
            self.study.keep(self.stamp(record))

    def _pick(self, suggested: Candidate) -> Pick:
        upcoming = self.sampler.upcoming
        if upcoming is not None and upcoming.candidate.id == suggested.id:
            return upcoming
        return Pick(suggested, "search" if self.records else "calibrate")  # it was enqueued

    def _deadline(self, pick: Pick) -> tuple[float, bool]:
        """The seconds that a probe may take, and whether the budget sets that limit. If it does
        not, the limit is the longest time that the prior gives a probe which does not hang."""
        by_mode, rate = self.prior.compile_seconds, pick.expected_rate
        setting = pick.candidate.setting
        compiling = 5 * compilation_of(setting).guess(by_mode)
        stepping = STEPS_TO_WAIT * setting.images_per_device_step / rate if rate else 0.0
        hung = PROBE_START_SECONDS + compiling + 2 * min(stepping, 3600.0)
        end = self.limits.seconds_left()
        if end is None or end >= hung:
            return hung, False
        return max(end, LEAST_PROBE_SECONDS), True

    def _report(
        self, kind: ProgressKind, pick: Pick, record: MeasurementRecord | None = None,
        deadline_seconds: float | None = None,
    ) -> None:  # fmt: skip
        self.on_progress(
            Progress(
                kind=kind,
                stage=pick.stage,
                candidate=pick.candidate,
                probe=len(self.records) + (kind == "start"),
                num_probes=self.limits.trials,
                best=self.best,
                seconds_left=self.limits.seconds_left(),
                deadline_seconds=deadline_seconds,
                record=record,
            )
        )

    def recommend(self, identity: StudyIdentity, stopped: str, notes: list[str]) -> Recommendation:
        """What the probes prove, in the study's order of them, which all tuners share."""
        order = {r.probe_id: place for place, r in enumerate(self.study.records())}
        self.records.sort(key=lambda r: order.get(r.probe_id, len(order)))
        records = self.in_space()
        sampler = self._sampler()
        for record in records:
            sampler.posterior.tell(candidate(record.setting), record)
        summary = Summary(
            identity=identity,
            budget_bytes=self.budget_bytes,
            asked=self.options.asked if self.options.chose_batch else None,
            plain_arm=self.plain_arm,
            plain_is_at_its_best=sampler.plain_is_at_its_best,
            num_candidates=len(self.space),
            stopped_because=stopped,
            least_bytes=sampler.posterior.least_bytes,
            ran=tuple(sampler.posterior.contenders().values()),
            untried=sampler.untried_modes() if "budget" in stopped else {},
            notes=tuple(notes),
        )
        return recommend(records, summary).model_copy(update={"asked": self.options.kept})


def _was_crowded(record: MeasurementRecord) -> bool:
    return record.inconclusive and not record.cut_short and not record.lost_device


def find_plain_arm(space: Space, model: Model) -> str | None:
    """The arm of the plain default: fp32, eager, no checkpointing, the library's own attention
    (eager where that is not known), and every other axis of the space at its default, or at the
    first value that was asked for. None where restrictions leave it out."""
    fields = TrainSetting.model_fields
    others = {
        axis: fields[axis].default if fields[axis].default in values else values[0]
        for axis, values in space.choices.items()
        if axis not in AXES
    }
    plain = {"precision": "fp32", "compile": "off", "checkpointing": "none", **others}
    plain_ones = [
        c for c in space.candidates
        if c.setting.optimizer_implementation != "fused"
        and all(getattr(c.setting, axis) == value for axis, value in plain.items())
    ]  # fmt: skip
    attentions = ["library", "eager", "sdpa"]
    if isinstance(model, SwinConfig):
        attentions.insert(0, find_library(model.library).default_attention(model))
    plain_ones.sort(key=lambda c: attentions.index(c.setting.attention))
    return plain_ones[0].arm if plain_ones else None


PROBES_SHARE = 0.5  # of the budget; it is left for probes, however long the preparation takes


@dataclass
class Limits:
    """What a search may use: probes of the whole study, and seconds by `clock`. The study's other
    probes, before this tuner and beside it, took `spent_seconds`."""

    trials: int | None = None
    budget_seconds: float | None = None
    spent_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.charged: set[str] = set()

    def begin_probing(self) -> None:
        """Counts the time until now, but at most so much that probes have their share: on a busy
        machine imports and estimates take most of a minute."""
        if self.budget_seconds is not None:
            most = (1 - PROBES_SHARE) * self.budget_seconds
            self.started = max(self.started, self.clock() - most)

    def charge(self, records: Iterable[MeasurementRecord]) -> None:
        """Counts the seconds of other probes, each once."""
        for record in records:
            if record.probe_id not in self.charged:
                self.charged.add(record.probe_id)
                self.spent_seconds += record.probe_seconds

    def seconds_left(self) -> float | None:
        """Seconds to the hard deadline; None: no limit."""
        if self.budget_seconds is None:
            return None
        used = self.clock() - self.started + self.spent_seconds
        return max(self.budget_seconds - used, 0.0)
