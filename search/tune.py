"""tune(): the one public entry. Finds the fastest setting for a model on a device by running it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from planner.callable_module import make_callable
from planner.environment.rates import load_rates
from planner.errors import PlannerError, UsageError, unknown_name
from planner.libraries.registry import find_library
from planner.libraries.resolve import resolve_model
from planner.schema import DeviceInfo, MeasurementRecord, SwinConfig, TrainSetting
from planner.schema.result import Recommendation
from planner.throughput import DeviceRates
from planner.units import format_bytes
from search.baseline import BaselineHunt, plain_arm
from search.baselines import WALKS, WalkStrategy
from search.prior import Estimator, Prior, estimated_prior, generic_prior
from search.probe.device import choose_device, describe_device, memory_in_use, versions, why_no_gpu
from search.probe.runner import ProbeEvent
from search.prober import DeviceProber
from search.rates import device_rates
from search.recommend import Search, recommend
from search.records import append_records, read_records
from search.replay import Replay
from search.ruling import ruled_out
from search.session import (
    Book,
    Limits,
    OnProgress,
    Prober,
    Progress,
    ReplayBook,
    ReplayProber,
    Session,
)
from search.space import Model, Space, make_space
from search.strategy import TOLERANCE, Choice, PlannerStrategy, Strategy
from search.study import STUDY_NAME, Identity, Study, make_study

STRATEGIES = ("planner", "tpe", "gp", "random", *WALKS)
BUDGET_SECONDS = 600.0
BASELINE_SHARE = 0.15  # of the budget, kept to measure what the gain is over
IMAGENET_IMAGES = 1_281_167  # ImageNet-1k's training split, what an epoch means unless said
# A probe that takes longer than all of this is hung: imports and building took under a minute on
# the slowest machine seen, compiling five times its guess.
START_SECONDS = 120.0
TIMING_SECONDS = 60.0
STEPS_TO_WAIT = 8  # two of warm-up, three timed, and some for a guess that is too low


@dataclass(frozen=True)
class Options:
    """What `tune` was asked, beyond the model; the fields are its parameters."""

    device: str = "auto"
    memory_bytes: int | None = None
    headroom: float = 0.05
    batch_sizes: tuple[int, ...] | None = None
    global_batch: int | None = None
    base: TrainSetting = field(default_factory=TrainSetting)
    restrict: Mapping[str, Sequence[str]] | None = None
    trials: int | None = None
    budget_seconds: float | None = BUDGET_SECONDS
    strategy: str = "planner"
    storage: str | None = None
    study_name: str = STUDY_NAME
    output: Path | None = None
    replay: Path | None = None
    steps: int | None = None
    epochs: float | None = None
    images_per_epoch: int = IMAGENET_IMAGES
    tolerance: float = TOLERANCE
    baseline: bool = True
    accept_different: bool = False
    seed: int = 0


def tune(
    model: Model | str | None,
    *,
    device: str = "auto",
    memory_bytes: int | None = None,
    headroom: float = 0.05,
    batch_size: int | Sequence[int] | None = None,
    global_batch: int | None = None,
    base: TrainSetting | None = None,
    restrict: Mapping[str, Sequence[str]] | None = None,
    trials: int | None = None,
    budget_seconds: float | None = BUDGET_SECONDS,
    strategy: str = "planner",
    storage: str | None = None,
    study_name: str = STUDY_NAME,
    output: Path | str | None = None,
    replay: Path | str | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    images_per_epoch: int = IMAGENET_IMAGES,
    tolerance: float = TOLERANCE,
    baseline: bool = True,
    accept_different: bool = False,
    seed: int = 0,
    estimator: Estimator | Literal["auto"] | None = "auto",
    prober: Prober | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Recommendation:
    """Probes settings of `model` on a device until the fastest is known; what it ran is what it
    recommends.

    `model` is a SwinConfig, a FactoryModel or what the command takes: LIBRARY:NAME, a file,
    package.module:factory.

    `memory_bytes` emulates a smaller device, `headroom` is the share of memory left free.
    `batch_size` fixes the micro-batch (or lists those to try); `global_batch` holds micro-batch ×
    accumulation × world. `restrict` names the values an axis (precision, checkpointing, compile,
    attention, optimizer) may take; other fields of `base` hold for every probe. It ends after
    `trials` probes in the study, `budget_seconds` (those that earlier runs of the study took
    included), or when another probe is expected to gain less than `tolerance` (a share).
    `steps` (of `base`'s global batch) or `epochs` rank by total time with compilation.
    `output` (default tune-LIBRARY-NAME) receives recommendation.json, probes.jsonl and, unless
    `storage` names another place, study.db; the same call goes on from there. `replay` is a file
    of records to search in place of a device (`model` may then be None). `estimator` gives the
    prior (None: none), `prober` runs a probe in place of a worker process.
    Ctrl-C ends with the best so far. Raises UsageError, UnsupportedError, StudyError and
    RecordsNotWrittenError (PlannerErrors all).
    """
    options = Options(
        device, memory_bytes, headroom, _batch_sizes(batch_size), global_batch,
        base or TrainSetting(), restrict, trials, budget_seconds, strategy, storage, study_name,
        Path(output) if output else None, Path(replay) if replay else None, steps, epochs,
        images_per_epoch, tolerance, baseline, accept_different, seed,
    )  # fmt: skip
    if strategy not in STRATEGIES:
        raise unknown_name("strategy", strategy, STRATEGIES, f"One of {', '.join(STRATEGIES)}.")
    if isinstance(model, str):
        model = resolve_model(model)
    if options.replay:
        return _replayed(model, options, estimator, on_progress)
    if model is None:
        raise UsageError("there is no model to tune.", "Name one, or pass --replay FILE.")
    return _probed(model, options, estimator, prober, on_progress)


def _batch_sizes(batch_size: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if batch_size is None:
        return None
    sizes = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
    if not sizes or min(sizes) < 1:
        raise UsageError(f"a batch is one image or more, and {min(sizes, default=0)} is not.")
    return sizes


@dataclass(frozen=True)
class Room:
    """The memory to search in: bytes a setting may take, what a probe is capped to (None: not),
    and what is to be said about it."""

    budget_bytes: int | None
    cap_bytes: int | None
    notes: tuple[str, ...]


def _probed(
    model: Model, options: Options, estimator: Estimator | Literal["auto"] | None,
    prober: Prober | None, on_progress: OnProgress,
) -> Recommendation:  # fmt: skip
    limits = Limits(options.trials, options.budget_seconds)
    wanted = choose_device(options.device)
    device = describe_device(wanted)
    room = _room(wanted, device, options)
    notes = list(room.notes)
    if wanted == "cpu" and options.device == "auto":
        notes.insert(0, f"No GPU here ({why_no_gpu()}): tuning on the CPU ({device.name}).")
    device = device.model_copy(update={"memory_cap_bytes": options.memory_bytes})
    space = make_space(
        model, device, options.base, restrict=options.restrict,
        batch_sizes=options.batch_sizes, global_batch=options.global_batch,
    )  # fmt: skip
    output = options.output or Path(_slug(model))
    output.mkdir(parents=True, exist_ok=True)
    study = make_study(options.storage, output, space, room.budget_bytes, options.study_name)
    identity = Identity(model, device, versions())
    notes += [
        f"Accepted as different: {d}." for d in study.adopt(identity, options.accept_different)
    ]
    fault = study.reconcile()
    if fault:
        notes.append(f"{fault}: read up to there, and the study has the rest.")
    limits.spent_seconds = _spent(study.records())
    for note in notes:
        on_progress(Progress("note", note))
    if estimator == "auto" and isinstance(model, SwinConfig):
        rates = device_rates(wanted, device, limits.seconds_left(), _note(on_progress))
        estimator = device_estimator(device, rates)
    prior = _prior(space, model, device, estimator, room.budget_bytes)
    job = Job(model, device, identity.versions, space, prior, room.budget_bytes, options, notes)
    if prober is not None:
        recommendation = job.run(study, prober, limits, on_progress)
    else:
        with DeviceProber(
            model, wanted, device, room.cap_bytes, _hear(on_progress), study.note_answer
        ) as own:
            recommendation = job.run(study, own, limits, on_progress)
    _write(output / "recommendation.json", recommendation)
    return recommendation


def _note(on_progress: OnProgress) -> Callable[[str], None]:
    return lambda text: on_progress(Progress("note", text))


def _hear(on_progress: OnProgress) -> Callable[[ProbeEvent], None]:
    """Passes on where a running probe is."""

    def heard(event: ProbeEvent) -> None:
        on_progress(Progress("step", event.phase, step_seconds=event.step_seconds))

    return heard


def _replayed(
    model: Model | None, options: Options, estimator: Estimator | Literal["auto"] | None,
    on_progress: OnProgress,
) -> Recommendation:  # fmt: skip
    assert options.replay, "asked for"
    if not options.replay.exists():
        raise UsageError(
            f"{options.replay} does not exist.", "Name a file of records (JSON lines)."
        )
    file = read_records(options.replay)
    replay = Replay(file.records, str(options.replay))
    if model is not None and model != replay.model:
        raise UsageError(f"{options.replay} is of {replay.model.title}, not of {model.title}.")
    notes = [f"Replayed from {options.replay}: nothing was run."]
    if file.fault:
        notes.append(f"{file.fault}: read up to there.")
    for note in notes:
        on_progress(Progress("note", note))
    total = options.memory_bytes or replay.device.memory_cap_bytes or replay.device.total_bytes
    budget = int(total * (1 - options.headroom))
    prior = _prior(replay.space, replay.model, replay.device, estimator, budget)
    # Nothing but recorded seconds is charged: the clock stands still.
    limits = Limits(options.trials, options.budget_seconds, clock=lambda: 0.0)
    job = Job(
        replay.model, replay.device, replay.versions, replay.space, prior, budget, options, notes
    )
    found = job.run(ReplayBook(), ReplayProber(replay, limits), limits, on_progress)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        _write(options.output / "recommendation.json", found)
    return found


@dataclass
class Job:
    """All that a search is about, put together: run it, get its recommendation."""

    model: Model
    device: DeviceInfo
    versions: dict[str, str]
    space: Space
    prior: Prior
    budget_bytes: int | None
    options: Options
    notes: list[str]

    def run(
        self, book: Book, prober: Prober, limits: Limits, on_progress: OnProgress
    ) -> Recommendation:
        """Searches, measures the plain default, and recommends. Ctrl-C ends it early, and so does
        a disk that is full: what was measured until then counts."""
        session = Session(
            self.space, book, prober, limits, self._deadline, self.budget_bytes, on_progress
        )
        on_progress(Progress("note", f"{len(self.space)} settings; {self.prior.basis}."))
        arm = plain_arm(self.space, library_attention(self.model))
        wants_baseline = arm is not None and self.options.baseline
        try:
            if wants_baseline and self.options.budget_seconds:
                limits.reserved_seconds = BASELINE_SHARE * self.options.budget_seconds
            stopped = session.run(self._strategy())
            limits.reserved_seconds = 0.0
            if arm and wants_baseline and session.best_rate():
                session.run(BaselineHunt(self.space, self.prior, self.budget_bytes, arm))
        except KeyboardInterrupt:
            stopped = "it was interrupted"
            session.hear()
            self._save(book, session.records)
        except PlannerError as error:
            if not session.records:
                raise
            stopped = "what was measured could not be kept"
            self.notes.append(str(error))
        return recommend(session.records, self._search(session.records, arm, stopped))

    def _save(self, book: Book, records: list[MeasurementRecord]) -> None:
        """An interrupt may have come between a probe's end and its line on disk."""
        if isinstance(book, Study) and book.records_path:
            append_records(book.records_path, records)

    def _search(self, records: list[MeasurementRecord], arm: str | None, stopped: str) -> Search:
        return Search(
            model=self.model,
            device=self.device,
            versions=self.versions,
            budget_bytes=self.budget_bytes,
            asked=self._asked(),
            plain_arm=arm or "",
            images=self._images(),
            num_candidates=len(self.space),
            stopped_because=stopped,
            ruled_out=ruled_out(self.space, self.prior, self.budget_bytes, records),
            notes=(*self.notes, *self._baseline_note(arm)),
        )

    def _baseline_note(self, arm: str | None) -> list[str]:
        if arm is None and self.options.baseline:
            return [
                "The plain default (fp32, eager, no checkpointing) was excluded: no gain is said."
            ]
        return []

    def _asked(self) -> TrainSetting:
        """The setting the person would have used: what the learning rate is compared with."""
        base, options = self.options.base, self.options
        if options.global_batch:
            size = options.global_batch // base.world_size
            return base.model_copy(update={"batch_size": size, "accumulate": 1})
        sizes = options.batch_sizes
        return base if sizes is None else base.model_copy(update={"batch_size": sizes[0]})

    def _images(self) -> float | None:
        """Images of the whole training on one device, where its length was said."""
        world = self.options.base.world_size
        if self.options.steps is not None:
            return self.options.steps * self._asked().global_batch / world
        if self.options.epochs is not None:
            return self.options.epochs * self.options.images_per_epoch / world
        return None

    def _strategy(self) -> Strategy:
        name = self.options.strategy
        if name == "planner":
            return PlannerStrategy(
                self.space, self.prior, self.budget_bytes,
                tolerance=self.options.tolerance, images=self._images(),
            )  # fmt: skip
        if name in WALKS:
            walk = WALKS[name](self.space, self.prior, self.budget_bytes, self.options.seed)
            return WalkStrategy(walk)
        from search.sampler import SamplerStrategy, make_sampler

        sampler = make_sampler(name, self.options.seed)
        return SamplerStrategy(self.space, sampler, self.budget_bytes)

    def _deadline(self, choice: Choice) -> float:
        """Seconds after which a probe is hung and not slow."""
        compiling = 5 * self.prior.compile_seconds[choice.candidate.setting.compile]
        rate = choice.expected_rate
        stepping = STEPS_TO_WAIT * choice.candidate.images / rate if rate else 0.0
        return START_SECONDS + TIMING_SECONDS + compiling + 2 * min(stepping, 3600.0)


def _room(wanted: str, device: DeviceInfo, options: Options) -> Room:
    """What memory there is for a setting: of the device or the size emulated, less what other
    processes hold and the headroom."""
    in_use = memory_in_use(wanted)
    total = in_use.total_bytes if in_use else device.total_bytes
    used = in_use.used_bytes if in_use else 0
    free = in_use.free_bytes if in_use else total
    notes = []
    if used > 0:
        notes.append(
            f"Other processes hold {format_bytes(used)} of {format_bytes(total)}: "
            f"{format_bytes(free)} are left."
        )
    limit = free
    if options.memory_bytes:
        limit = min(free, options.memory_bytes)
        notes.append(
            f"Capped to {format_bytes(options.memory_bytes)}: this emulates a smaller device, "
            "whose speed and context are its own."
        )
    if device.kind == "cpu":
        notes.append("Memory on the CPU is the growth of the worker's peak resident set.")
    budget = int(limit * (1 - options.headroom))
    notes.append(f"Settings may take {format_bytes(budget)} ({options.headroom:.0%} kept free).")
    capped = options.memory_bytes is not None or device.kind == "cpu"
    return Room(budget, limit if capped else None, tuple(notes))


def _prior(
    space: Space, model: Model, device: DeviceInfo,
    estimator: Estimator | Literal["auto"] | None, budget_bytes: int | None,
) -> Prior:  # fmt: skip
    if estimator is None or not isinstance(model, SwinConfig):
        return generic_prior(space, device)
    if estimator == "auto":
        estimator = device_estimator(device, load_rates(device.name))
    return estimated_prior(space, model, device, estimator, budget_bytes)


def device_estimator(device: DeviceInfo, rates: DeviceRates | None = None) -> Estimator:
    """The planner's estimate for `device`, quick enough for a whole space; its time by `rates`, or
    by the catalogue's."""
    from search.estimator import DeviceEstimator

    return DeviceEstimator(device, rates)


def library_attention(model: Model) -> str | None:
    """The attention a library has by itself on CUDA, for the plain default; None for a factory."""
    if not isinstance(model, SwinConfig):
        return None
    return find_library(model.library).default_attention(model)


def _spent(records: Sequence[MeasurementRecord]) -> float:
    return sum(record.probe_seconds for record in records)


def _slug(model: Model) -> str:
    return "tune-" + re.sub(r"[^A-Za-z0-9_.]+", "-", model.title).strip("-")


def _write(path: Path, recommendation: Recommendation) -> None:
    """Whole or not at all: written beside and moved into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w") as file:
            file.write(recommendation.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise PlannerError(
            f"{path} cannot be written: {error.strerror}.",
            "The probes are kept in probes.jsonl: free space and run the same command.",
        ) from error


make_callable(__name__, tune)
