"""The part of a search that feeds what it recommends: the loader, the run that proves both, which
of them bounds. Whatever fails here, the step's result stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from planner.core.errors import PlannerError
from planner.core.files import DATA_FOLDER, DATA_PROBES, FED_RUNS
from planner.core.schema import DeviceInfo, MeasurementRecord, Model, TrainSetting
from planner.core.schema.loading import (
    DataRecommendation,
    DataSource,
    FedRecord,
    LoaderRecord,
    LoaderSetting,
    recorded_processors,
)
from planner.core.schema.result import Recommendation
from planner.machine.host import read_host
from planner.training.loading.sources import find_source
from search.loader.finding import find_loader
from search.loop.contenders import Contender
from search.loop.interrupts import ending, hold, let_go
from search.loop.limits import START_SECONDS, TIMING_SECONDS
from search.loop.options import SearchOptions
from search.loop.progress import Progress
from search.loop.progress_text import progress_line
from search.loop.study.records import RecordsNotWrittenError, append_records, read_records
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import ProbeEvent
from search.probe.protocol import FedRequest
from search.tuning.feeding.analysis import Machine, loader_for, make_feeding, predicted_rate
from search.tuning.feeding.matching import class_notes
from search.tuning.feeding.proving import find_kept, prove
from search.tuning.feeding.request import AskedData

# Of --budget: what the loader's search and the run that proves both may take; the step's search has
# the rest. What one part leaves goes to the next.
LOADER_SHARE = 0.25
PROOF_SHARE = 0.10
# A fed run takes what the step's own probe took, twice: it times its steps twice.
_PROOF_PROBES = 2.0


def step_budget(options: SearchOptions) -> float | None:
    """Seconds of the budget that the step's search may take; None is no limit."""
    share = 1.0
    if options.data is not None:
        share -= LOADER_SHARE + PROOF_SHARE
    elif options.with_data is not None:
        share -= PROOF_SHARE
    return None if options.budget_seconds is None else options.budget_seconds * share


NOT_RUN = (
    "Step and loader were not run together: a replay runs nothing, and this is the law's word."
)


@dataclass
class FeedingPhase:
    """Feeds a recommendation on `where`. `seconds_left` of the whole budget is asked when a part
    begins."""

    model: Model
    asked: AskedData
    where: str
    device: DeviceInfo
    output: Path
    seconds_left: Callable[[], float | None]
    say: Callable[[str], None] = lambda text: None
    on_event: Callable[[ProbeEvent], None] | None = None
    fork_server: ForkServer | None = None
    cap_bytes: int | None = None
    options: SearchOptions = field(default_factory=SearchOptions)
    notes: list[str] = field(default_factory=list)

    def feed(self, step: Recommendation, found: Sequence[Contender]) -> Recommendation:
        """`step` with its feeding; with a note, where the loader cannot be measured. Ctrl-C ends it
        with what is known."""
        if step.setting is None or step.evidence is None:
            return step
        if not let_go():
            return _noted(step, f"The data were not looked at: {ending()}.")
        self.notes = class_notes(self.model, self.asked.source)
        loader: DataRecommendation | None = None
        proof: FedRecord | None = None
        try:
            loader = self._loader(step.setting)
            if loader.evidence is None or loader.evidence.images_per_second is None:
                return _noted(step, *self.notes, _nothing_loads(loader))
            loader = self._beside(step.evidence, loader)
            if not let_go():
                raise KeyboardInterrupt
            proof = self._proof(step.evidence, loader)
            hold()
        except KeyboardInterrupt:
            self.notes.append(f"Step and loader were not run together: {ending()}.")
        except PlannerError as error:
            self.notes.append(f"The data were not measured to the end: {_one_line(error)}")
        hold()
        if loader is None or loader.evidence is None or not loader.evidence.images_per_second:
            return _noted(step, *self.notes)
        return with_feeding(step, loader, proof, found, self._machine, self.notes)

    def _loader(self, setting: TrainSetting) -> DataRecommendation:
        known = self.asked.known
        if known is not None:
            self.notes += known_notes(known, setting)
            return known
        folder = self.output / DATA_FOLDER
        spent = sum(
            r.probe_seconds for r in read_records(folder / DATA_PROBES, LoaderRecord).records
        )
        left = self.seconds_left()
        share = LOADER_SHARE / (LOADER_SHARE + PROOF_SHARE)
        size = getattr(self.model, "image_size", None)
        return find_loader(
            self.asked.source, on_progress=self._hear, batch_size=setting.batch_size,
            image_size=size, device=self.where, output=folder, seed=self.options.seed,
            budget_seconds=None if left is None else max(0.0, left - spent) * share + spent,
            accept_different=self.options.accept_different,
        )  # fmt: skip

    def _beside(self, step: MeasurementRecord, loader: DataRecommendation) -> DataRecommendation:
        """The best of the measured loaders beside this step."""
        found = loader_for(step, loader, self._machine)
        if found.setting != loader.setting and loader.setting and found.setting:
            self.notes.append(
                f"By itself {loader.setting.title} is the faster loader; beside this step "
                f"{found.setting.title} is computed to feed more."
            )
        return found

    @property
    def _machine(self) -> Machine:
        return Machine(self.asked.processors, self.where == "cpu")

    def _hear(self, progress: Progress[LoaderSetting, LoaderRecord]) -> None:
        """Tells of the loader's probes as a line each, beside those of the step's."""
        if progress.kind in ("note", "end") and (line := progress_line(progress)):
            self.say(line)

    def _proof(self, step: MeasurementRecord, loader: DataRecommendation) -> FedRecord | None:
        """The fed run, an earlier one of the same, or None where there is no time for it."""
        assert loader.evidence is not None, "it was measured"
        request = self._request(step.setting, loader.data, for_batch(loader, step.setting))
        path = self.output / FED_RUNS
        kept = find_kept(path, request)
        if kept is not None:
            return kept
        left, wanted = self.seconds_left(), _PROOF_PROBES * step.probe_seconds
        if left is not None and left < min(wanted, step.probe_seconds + request.fed_seconds):
            self.notes.append(
                "Step and loader were not run together: the budget has ended. Run the same command "
                "with a longer --budget to go on."
            )
            return None
        hung = START_SECONDS + TIMING_SECONDS + _PROOF_PROBES * wanted
        self.say("Training with the real loader, to prove both.")
        proof = prove(
            request,
            predicted=predicted_rate(step, loader.evidence, self._machine),
            deadline_seconds=hung if left is None else min(hung, left),
            device=self.device,
            on_event=self.on_event,
            fork_server=self.fork_server,
        )
        try:
            append_records(path, [proof])
        except RecordsNotWrittenError as error:
            self.notes.append(error.message)
        return proof

    def _request(
        self, setting: TrainSetting, source: DataSource, loader: LoaderSetting
    ) -> FedRequest:
        """The CPU's cap is left out: workers would inherit it, and what they need is their own."""
        return FedRequest(
            model=self.model, setting=setting, device=self.where, source=source, loader=loader,
            memory_cap_bytes=None if self.where == "cpu" else self.cap_bytes,
        )  # fmt: skip


def for_batch(loader: DataRecommendation, setting: TrainSetting) -> LoaderSetting:
    """The loader's setting with the step's micro-batch."""
    assert loader.setting is not None, "it was measured"
    return loader.setting.model_copy(update={"batch_size": setting.batch_size})


def with_feeding(
    step: Recommendation, loader: DataRecommendation, proof: FedRecord | None,
    found: Sequence[Contender], machine: Machine, notes: Sequence[str],
) -> Recommendation:  # fmt: skip
    """`step` with what was found of its data."""
    assert step.evidence is not None, "only what was measured is fed"
    feeding = make_feeding(step.evidence, loader, proof, found, machine)
    said = (*feeding.notes, *loader.warnings, *notes)
    feeding = feeding.model_copy(update={"notes": said})
    return step.model_copy(update={"feeding": feeding})


def judge_by_law(
    step: Recommendation, asked: AskedData, found: Sequence[Contender]
) -> Recommendation:
    """`step` with what the law says of it and of a loader that is known, where nothing is run."""
    known = asked.known
    if step.evidence is None or known is None or known.evidence is None:
        return step
    machine = Machine(asked.processors, step.device.kind == "cpu")
    known = loader_for(step.evidence, known, machine)
    notes = [*class_notes(step.model, asked.source), NOT_RUN]
    return with_feeding(step, known, None, found, machine, notes)


def known_notes(known: DataRecommendation, setting: TrainSetting) -> list[str]:
    """What is to be said of a loader that was measured before: for another batch, or of data that
    have changed since."""
    notes = []
    assert known.setting is not None, "it was measured"
    if known.setting.batch_size != setting.batch_size:
        notes.append(
            f"The loader was measured with batches of {known.setting.batch_size}, and the step "
            f"takes {setting.batch_size}."
        )
    here, there = read_host().cpus, recorded_processors(known.host)
    if there is not None and there != here:
        notes.append(f"The loader was measured with {there:g} processors, and {here:g} are here.")
    try:
        if find_source(known.data.location).fingerprint != known.data.fingerprint:
            notes.append(f"{known.data.location} has changed since its loader was measured.")
    except PlannerError as error:
        notes.append(f"The data are not there any more: {error.message}")
    return notes


def _nothing_loads(loader: DataRecommendation) -> str:
    why = loader.advice or loader.stopped_because or "no probe of a loader ended well"
    return f"The data could not be measured: {why.partition(chr(10))[0]}"


def _noted(step: Recommendation, *notes: str) -> Recommendation:
    return step.model_copy(update={"notes": (*step.notes, *notes)})


def _one_line(error: PlannerError) -> str:
    return str(error).replace("\n", " ")
