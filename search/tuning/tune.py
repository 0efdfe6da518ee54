"""tune(): the one public entry. Finds the fastest setting for a model on a device by running it."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Unpack

from planner.core.errors import UnsupportedError, UsageError
from planner.core.files import TUNE_PROBES, TUNE_RESULT, write_whole
from planner.core.schema import FactoryModel, Model
from planner.core.schema.record import Recommendation
from planner.estimation.arguments import ModelLike, read_model
from planner.libraries.building import check_factory
from planner.memory.allocator_config import (
    AllocatorConfig,
    allocator_in_environment,
    recorded_allocator,
)
from search.loop.interrupts import handle_signals
from search.loop.limits import Limits, probe_deadline
from search.loop.memory_budget import find_budget, less_headroom, with_allocator
from search.loop.options import SearchKeywords, SearchOptions
from search.loop.phases import search_and_recommend
from search.loop.prober import DeviceProber, Prober, show_steps
from search.loop.progress import OnProgress, note_taker
from search.loop.replay import Replay, ReplayProber, refuse_measured
from search.loop.result_file import make_folder, write_result
from search.loop.session import Session
from search.loop.space import make_space
from search.loop.study.identity import Identity
from search.loop.study.lock import hold_gpu
from search.loop.study.mixture import describe_mixture
from search.loop.study.optuna_study import make_study
from search.loop.study.records import format_record, read_records
from search.loop.study.study import MemoryStudy
from search.loop.surrogate.prior import Estimator
from search.probe.device import (
    check_world,
    choose_device,
    describe_device,
    least_free,
    name_card,
    versions,
    why_no_gpu,
)
from search.probe.device_rates import device_rates, kept_rates
from search.probe.parent.environment import rank_threads
from search.probe.parent.fork_server import STEP_MODULES, WORLD_MODULES
from search.probe.parent.ranks import rank_devices
from search.tuning.allocator import ALLOCATOR_PROBES, compare_allocators, usual_options
from search.tuning.device_prior import device_prior
from search.tuning.feeding import FEEDING_SHARE, check_data, feed
from search.tuning.own_model import ask_factory, with_own_optimizer


def tune(
    model: ModelLike | None,
    *,
    estimator: Estimator | Literal["auto"] | None = "auto",
    prober: Prober | None = None,
    on_progress: OnProgress = lambda progress: None,
    **options: Unpack[SearchKeywords],
) -> Recommendation:
    """Find the fastest setting for a model on a device, by short real training runs.

    What it recommends is a setting that it ran. Ctrl-C ends with the best so far; the same call
    goes on from there.

    Args:
        model: A SwinConfig (or its fields), a FactoryModel, or what the command takes:
            LIBRARY:NAME, a file, package.module:factory. None where `replay` is given.
        estimator: What gives the prior; None for a search without one.
        prober: Runs a probe in place of a worker process.
        on_progress: Called with each event of the search.
        device: `auto`, `cpu`, `cuda:0` …
        gpus: How many GPUs of this machine are probed together, a rank on each; under DDP unless
            `restrict` names other values of parallelism.
        nodes: How many machines these stand for; more than one only on the CPU.
        memory_bytes: Emulate a smaller device: bytes, or text such as `24GiB`.
        allocator: Options of the caching allocator for every probe, in place of those in this
            environment. Where neither says any, probes on CUDA run with expandable segments, and
            what is recommended is probed once without them.
        headroom: Share of the memory to leave free.
        batch_size: The micro-batch, or several to try; None searches it.
        global_batch: Micro-batch × accumulation × world, held exactly.
        base: The setting (or its fields) that every probe shares where no axis varies it.
        restrict: By axis (precision, checkpointing, compile, attention, optimizer) the values it
            may take; any other field of a setting becomes an axis by being named.
        start: The setting (its fields, or `batch_size=32,precision=bf16`) to probe first and to
            search around. Of its fields that are no axis nor the micro-batch, `base` says.
        trials: At most so many probes in the study.
        budget_seconds: Time for probes, those of earlier runs of the study included; None for no
            limit.
        tolerance: End when no probe is expected to gain more than this share.
        strategy: Who chooses the next probe; `planner tune --help` names them.
        seed: Of strategies that draw at random.
        steps: Optimizer steps of the training: rank by its total time, compilation included.
        epochs: The same, in epochs of `images_per_epoch`.
        images_per_epoch: Images in an epoch (default: ImageNet-1k's).
        baseline: Measure the plain default too, to compare with.
        replay: A file of records to search in place of a device.
        storage: An Optuna storage, or a `.journal` file; by default a file in `output`.
        study_name: The study's name in the storage.
        accept_different: Go on with a study of another device or software.
        output: Folder for recommendation.json and probes.jsonl (default: tune-LIBRARY-NAME).
        data: A folder of pictures, or MODULE:FACTORY: what it recommends is trained on them by
            the emitted script for thirty steps, with the best loader that is found.

    Returns:
        The recommendation, also where nothing could be measured: its `status` says so.

    Raises:
        UsageError: Something asked is unknown, out of its bounds or contradictory.
        UnsupportedError: The model, setting or platform cannot be probed.
        StudyError: The study cannot be read, written or continued.
        RecordsNotWrittenError: Probes cannot be kept.
        ResultNotWrittenError: The result cannot be kept; it has the recommendation.
    """
    asked = SearchOptions.of(options)
    chosen = None if model is None else read_model(model, {})
    with handle_signals(signal.SIGINT):
        if asked.replay:
            return _replayed(chosen, asked, estimator, on_progress)
        if chosen is None:
            raise UsageError("there is no model to tune.", "Name one, or pass --replay FILE.")
        if prober is None and isinstance(chosen, FactoryModel):
            check_factory(chosen.factory)
        # Probes are recorded with what their environment says, and go by it.
        usual, said = None, list[str]()
        if asked.allocator is None:
            usual, said = usual_options(choose_device(asked.device))
        with allocator_in_environment(asked.allocator or usual):
            return _probed(chosen, asked, estimator, prober, on_progress, usual is not None, said)


def _probed(
    model: Model, options: SearchOptions, estimator: Estimator | Literal["auto"] | None,
    prober: Prober | None, on_progress: OnProgress, by_default: bool, said_of_default: list[str],
) -> Recommendation:  # fmt: skip
    """`by_default`: nobody named the allocator's options that probes run with; `said_of_default` is
    what to say of those."""
    base, restrict = options.base, options.restrict
    made = ask_factory(model) if prober is None and isinstance(model, FactoryModel) else None
    data = None
    if options.data is not None:
        data = check_data(options.data, model, made is not None and made.is_task)
    if made is not None and made.has_optimizer:
        base = with_own_optimizer(base, restrict or {}, model.title)
        restrict = {axis: v for axis, v in (restrict or {}).items() if axis != "optimizer"}
    budget = options.budget_seconds
    if budget is not None and data is not None:
        budget *= 1 - FEEDING_SHARE
    limits = Limits(options.trials, budget)
    where = choose_device(options.device)
    found = describe_device(where)
    identity = Identity(
        model, found.model_copy(update={"memory_cap_bytes": options.memory_bytes}), versions()
    )
    allocator, allocator_notes = _allocator(identity, options)
    allocator_notes = said_of_default or allocator_notes
    check_world(where, options.base)
    devices = rank_devices(where, options.base)
    memory = find_budget(found, least_free(devices), options, allocator, len(devices))
    output = make_folder(options.output or default_output(model))
    space = make_space(
        model, identity.device, base, restrict=restrict,
        batch_sizes=options.batch_size, global_batch=options.global_batch, start=options.start,
    )  # fmt: skip
    study = make_study(options.storage, output, space, memory.budget_bytes, options.study_name)
    notes = [*allocator_notes, *memory.notes, *space.left_out]
    if options.start is not None and space.first is None:
        notes.append("The setting to begin with cannot run here: the search begins as usual.")
    notes += study.take_over(identity, options.accept_different)
    if where == "cpu" and options.device == "auto":
        notes.insert(0, f"No GPU here ({why_no_gpu()}): tuning on the CPU ({found.name}).")
    limits.charge(study.records())
    whole = Limits(None, options.budget_seconds, limits.spent_seconds)
    say, hear = note_taker(on_progress), show_steps(on_progress)
    with contextlib.ExitStack() as stack:
        notes += _hold_devices(stack, where, devices)
        for note in notes:
            say(note)
        rates = None
        if estimator == "auto":
            rates = device_rates(where, identity.device, limits.seconds_left(), say)
        own = None
        start = partial(
            DeviceProber, model, where, identity.device, memory.cap_bytes, hear,
            modules=STEP_MODULES if len(devices) == 1 else WORLD_MODULES,
        )  # fmt: skip
        if prober is None:
            own = start(on_result=study.receive)
            prober = stack.enter_context(own)
        prior, said = device_prior(
            space, model, identity.device, estimator, memory.budget_bytes, rates=rates,
            allocator=allocator, seconds_left=limits.seconds_left(), say=say,
        )  # fmt: skip
        limits.begin_probing()
        session = Session(
            space, study, prober, limits, probe_deadline(prior), memory.budget_bytes, on_progress
        )
        recommendation = search_and_recommend(session, identity, prior, options, [*notes, *said])
        if by_default and own is not None and data is None:
            recommendation = compare_allocators(
                recommendation, lambda: stack.enter_context(start()), limits,
                len(session.records), memory.budget_bytes, output / ALLOCATOR_PROBES,
            )  # fmt: skip
        where_kept = study.spilled or study.records_path
        write_result(output / TUNE_RESULT, recommendation, where_kept)
        if data is not None:
            whole.spent_seconds = limits.spent_seconds
            recommendation = feed(recommendation, data, where, output, whole.seconds_left(), say)
            write_result(output / TUNE_RESULT, recommendation, where_kept)
        study.attach(output / TUNE_RESULT)
    return recommendation


def _hold_devices(stack: contextlib.ExitStack, where: str, devices: Sequence[str]) -> list[str]:
    """Keeps other tuners off the devices while the stack lasts; what is to be said of them."""
    uuids = dict.fromkeys(describe_device(each).uuid for each in devices)
    held = [stack.enter_context(hold_gpu(uuid)) for uuid in uuids]
    return [*_card_notes(where, all(held)), *_world_notes(devices)]


def _card_notes(where: str, alone: bool) -> list[str]:
    """Which of differing cards is tuned, and whether another tuner is at it."""
    card = name_card(where)
    shared = (
        f"Another tuner of this machine is at {where}: both measure too slow, and each may take "
        "the other's memory. Let one end first."
    )
    return [*([card] if card else []), *([] if alone else [shared])]


def _world_notes(devices: Sequence[str]) -> list[str]:
    """How several ranks are measured, and what they share."""
    if len(devices) == 1:
        return []
    num, threads = len(devices), rank_threads(len(devices))
    notes = [
        f"Each probe is {num} ranks: its memory is the fullest's, its time the slowest's, and "
        f"rates in tables are one device's. Each rank computes with {threads} "
        f"thread{'s' * (threads > 1)} of the CPU."
    ]
    names = sorted({describe_device(each).name for each in devices})
    if len(names) > 1:
        notes.append(f"The GPUs differ ({', '.join(names)}): all wait for the slowest.")
    if devices[0] == "cpu":
        notes.append("Ranks on the CPU are a rehearsal: they share its cores, and gloo is no NCCL.")
    return notes


def _allocator(
    identity: Identity, options: SearchOptions
) -> tuple[AllocatorConfig | None, list[str]]:
    """The caching allocator's options that probes run with, and what is to be said of them.

    Raises UsageError for options that torch would not start with.
    """
    if identity.device.kind != "cuda":
        idle = "The allocator's options are those of CUDA's: they do nothing for probes on the CPU."
        return None, [idle] if options.allocator is not None else []
    try:
        found = recorded_allocator(identity.versions)
    except UnsupportedError as error:
        return None, [f"Memory is guessed as with torch's own allocator: {error.message}"]
    if found is None:
        return None, []
    return found, [f"Probes run with the allocator's options {found.source}."]


def _replayed(
    model: Model | None, options: SearchOptions, estimator: Estimator | Literal["auto"] | None,
    on_progress: OnProgress,
) -> Recommendation:  # fmt: skip
    assert options.replay, "asked for"
    source = options.replay / TUNE_PROBES if options.replay.is_dir() else options.replay
    if not source.exists():
        raise UsageError(
            f"{source} does not exist.",
            "Name a file of records (JSON lines), or the --output of 'planner tune'.",
        )
    file = read_records(source)
    replay = Replay(file.records, str(source))
    if model is not None and model != replay.model:
        raise _of_another(str(source), replay.model, model)
    output = make_folder(options.output) if options.output else None
    if output is not None:
        refuse_measured(output)
    identity = Identity(replay.model, replay.device, replay.versions)
    allocator, allocator_notes = _allocator(identity, options)
    notes = [f"Replayed from {source}: nothing was run.", *allocator_notes]
    if file.fault:
        notes.append(f"{file.fault}: read up to there.")
    mixture = describe_mixture(file.records)
    if mixture:
        notes.append(mixture)
    say = note_taker(on_progress)
    for note in notes:
        say(note)
    sizes = (options.memory_bytes, replay.device.memory_cap_bytes, replay.device.total_bytes)
    limit = with_allocator(next(n for n in sizes if n is not None), replay.device, allocator)
    budget = less_headroom(limit, options.headroom)
    prior, said = device_prior(
        replay.space, replay.model, replay.device, estimator, budget,
        rates=kept_rates(replay.device, replay.versions.get("torch")), allocator=allocator, say=say,
    )  # fmt: skip
    # Nothing but recorded seconds is charged: the clock stands still.
    limits = Limits(options.trials, options.budget_seconds, clock=lambda: 0.0)
    session = Session(
        replay.space, MemoryStudy(), ReplayProber(replay, limits), limits, probe_deadline(prior),
        budget, on_progress,
    )  # fmt: skip
    found = search_and_recommend(session, identity, prior, options, [*notes, *said])
    if output is not None:
        said = _keep_replayed(session, source, output / TUNE_PROBES)
        found = found.model_copy(update={"notes": (*found.notes, *said)})
        write_result(output / TUNE_RESULT, found)
    return found


def _keep_replayed(session: Session, source: Path, path: Path) -> list[str]:
    """Leaves what a replay went through; what is to be said of it. A replay of these same probes
    keeps them all."""
    try:
        if not (path.exists() and path.samefile(source)):
            write_whole(path, b"".join(format_record(record) for record in session.records))
    except OSError as error:
        return [f"The probes of this replay were not written to {path}: {error.strerror}"]
    return []


def _of_another(source: str, recorded: Model, asked: Model) -> UsageError:
    """What differs, where the names do not say it."""
    message = f"{source} is of {recorded.title}, not of {asked.title}."
    if recorded.title != asked.title or type(recorded) is not type(asked):
        return UsageError(message, "Omit the model, or name the recorded one.")
    theirs, ours = recorded.model_dump(), asked.model_dump()
    differing = [f"{f} {theirs[f]} and not {ours[f]}" for f in ours if theirs[f] != ours[f]]
    return UsageError(
        f"{source} is of another {asked.title}: {', '.join(differing)}.",
        "Omit MODEL to search what was recorded.",
    )


def default_output(model: Model) -> Path:
    """The folder of a search that names none."""
    return Path("tune-" + re.sub(r"[^A-Za-z0-9_.]+", "-", model.title).strip("-")[:100])
