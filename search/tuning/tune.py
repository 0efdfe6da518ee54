"""`search.tune`: finds the fastest setting for a model on a device, by running it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from planner.advice.wish import EXPANDABLE
from planner.core.errors import UnsupportedError, UsageError
from planner.core.files import TUNE_PROBES, TUNE_RESULT
from planner.core.schema import DeviceInfo, FactoryModel, Model, TrainSetting
from planner.core.schema.record import Recommendation, noteworthy_bytes
from planner.core.schema.setting import OWN_OPTIMIZER
from planner.core.units import format_bytes
from planner.estimation.arguments import ModelLike, read_model
from planner.estimation.device_estimator import DeviceEstimator
from planner.estimation.ledgers import is_on_shapes
from planner.ledger import cache
from planner.ledger.cache import Key, source_digest
from planner.libraries.factories import check_factory
from planner.machine.torch_build import installed_build
from planner.memory import allocator_config
from planner.memory.allocator_config import AllocatorConfig
from search.loop.options import SearchOptions, read_options
from search.loop.prober import DeviceProber, OnProgress, Prober, note_taker
from search.loop.records import hold_folder, hold_gpu, make_folder, write_result
from search.loop.search import PROBES_SHARE, Limits, Search, find_plain_arm
from search.loop.signals import handle_signals, held, interruptible
from search.loop.space import Restriction, Space, make_space
from search.loop.study import ProbeStudy, StudyIdentity
from search.loop.surrogate.prior import Estimator, Prior, estimated_prior, generic_prior
from search.probe.device import (
    MemoryInUse,
    check_world,
    choose_device,
    describe_device,
    least_free,
    name_card,
    versions,
    why_no_gpu,
    why_no_segments,
)
from search.probe.parent import STEP_MODULES, WORLD_MODULES, rank_devices, world_notes
from search.tuning.user_code import FEEDING_SHARE, FactoryAnswer, ask_factory, check_data, feed


def tune(
    model: ModelLike,
    *,
    estimator: Estimator | Literal["auto"] | None = "auto",
    prober: Prober | None = None,
    on_progress: OnProgress = lambda progress: None,
    **options: Any,
) -> Recommendation:
    """Find the fastest setting for a model on a device, by short real training runs.

    What it recommends is a setting that it ran. Ctrl-C ends with the best so far; the same call
    resumes it.

    Args:
        model: A SwinConfig (or its fields), a FactoryModel, or what the command takes:
            LIBRARY:NAME, a file, package.module:factory.
        estimator: What gives the prior; None for a search without one.
        prober: Runs a probe in place of a worker process.
        on_progress: Called with each event of the search.
        device: `auto`, `cpu`, `cuda:0` …
        gpus: How many GPUs of this machine a probe uses together, with a rank on each; under DDP
            unless `restrict` names other values of parallelism.
        memory_bytes: Emulate a smaller device: bytes, or text such as `24GiB`.
        allocator: Options of the caching allocator for every probe, in place of those in this
            environment. If neither has any, probes on CUDA run with expandable segments.
        headroom: Share of the memory to leave free.
        batch_size: The micro-batch, or several to try; None searches it.
        global_batch: Micro-batch × accumulation × world, held exactly.
        base: The setting (or its fields) that every probe shares where no axis varies it.
        restrict: The values that each axis may take (precision, checkpointing, compile, attention,
            optimizer). Any other field of a setting that you name here becomes an axis.
        start: The setting (its fields, or `batch_size=32,precision=bf16`) to probe first and to
            search around. Only its axes and its micro-batch count: `base` has all other fields.
        trials: At most so many probes in the study.
        budget_seconds: Time for probes, those of earlier runs of the study included; None for no
            limit.
        tolerance: End when three more probes should together gain less than this share.
        storage: An Optuna storage, or a `.journal` file; without one the study is in memory, and
            one tuner at a time continues from the records in `output`.
        accept_different: Continue a study of another device or software.
        output: Folder for recommendation.json and probes.jsonl (default: tune-LIBRARY-NAME).
        data: A folder of pictures, or MODULE:FACTORY. The emitted script then trains what it
            recommends for thirty steps on them, with the best loader that it finds.

    Returns:
        The recommendation, also where nothing could be measured: its `status` says so.

    Raises:
        UsageError: An argument is unknown, out of its bounds or contradicts another.
        UnsupportedError: The model, setting or platform cannot be probed.
        StudyError: The study cannot be read, written or continued.
        RecordsNotWrittenError: Probes cannot be kept.
        ResultNotWrittenError: The result cannot be kept; it has the recommendation.
    """
    asked = read_options(options)
    chosen = read_model(model, {})
    with handle_signals(signal.SIGINT), held():
        if prober is None and isinstance(chosen, FactoryModel):
            with interruptible():
                check_factory(chosen.factory)
        # Probes take the allocator's options from their environment, and are recorded with them.
        usual, notes = None, list[str]()
        if asked.allocator is None:
            usual, notes = usual_options(choose_device(asked.device))
        with allocator_config.set_environment_options(asked.allocator or usual):
            return _tune(chosen, asked, estimator, prober, on_progress, notes)


def _tune(
    model: Model, options: SearchOptions, estimator: Estimator | Literal["auto"] | None,
    prober: Prober | None, on_progress: OnProgress, default_notes: list[str],
) -> Recommendation:  # fmt: skip
    """`default_notes` are those on the allocator's options where nobody named any."""
    made = None
    if prober is None and isinstance(model, FactoryModel):
        with interruptible():
            made = ask_factory(model)
    data = None
    if options.data is not None:
        data = check_data(options.data, model, made is not None and made.is_task)
    budget = options.budget_seconds
    if budget is not None and data is not None:
        budget *= 1 - FEEDING_SHARE
    limits = Limits(options.trials, budget)
    place = _find_place(model, options, default_notes)
    study, output = _open_study(model, options, place, made)
    notes = [*place.notes, *study.space.left_out]
    if options.start is not None and study.space.first is None:
        notes.append("The setting to begin with cannot run here: the search begins as usual.")
    say = note_taker(on_progress)
    with contextlib.ExitStack() as stack:
        if options.storage is None:
            stack.enter_context(hold_folder(output))
        notes += study.take_over(place.identity, options.accept_different)
        notes += [*_hold_devices(stack, place), *world_notes(place.devices)]
        for note in notes:
            say(note)
        limits.charge(study.records())
        whole = Limits(None, options.budget_seconds, limits.spent_seconds)
        own = None
        with interruptible():
            if prober is None:
                prober = own = stack.enter_context(place.prober(on_progress))
            prior, prior_notes = device_prior(
                study.space, model, place.identity.device, estimator, allocator=place.allocator,
                seconds_left=limits.seconds_left(), say=say,
            )  # fmt: skip
        limits.begin_probing()
        say(f"{len(study.space)} settings; {prior.basis}.")
        arm = find_plain_arm(study.space, model)
        search = Search(study, prior, prober, limits, options, arm, on_progress)
        if own is not None:
            own.on_result = search.receive
        stopped, faults = search.run()
        found_notes = [*faults, *place.memory.notes, *prior_notes]
        recommendation = search.recommend(place.identity, stopped, found_notes)
        write_result(output / TUNE_RESULT, recommendation, study.path)
        if data is not None:
            whole.spent_seconds = limits.spent_seconds
            left = whole.seconds_left()
            recommendation = feed(recommendation, data, place.where, output, left, say)
            write_result(output / TUNE_RESULT, recommendation, study.path)
    return recommendation


@dataclass(frozen=True)
class _Place:
    """Where a search probes and by what a study knows it; with what memory, and notes on these."""

    where: str
    devices: Sequence[str]
    identity: StudyIdentity
    allocator: AllocatorConfig | None
    memory: MemoryBudget
    notes: list[str]

    def prober(self, on_progress: OnProgress) -> DeviceProber:
        """What probes here. Entered, it starts the process that workers are forked from."""
        modules = STEP_MODULES if len(self.devices) == 1 else WORLD_MODULES
        model, device, cap = self.identity.model, self.identity.device, self.memory.cap_bytes
        return DeviceProber(model, self.where, device, cap, on_progress, modules)


def _find_place(model: Model, options: SearchOptions, default_notes: list[str]) -> _Place:
    """Raises UsageError and UnsupportedError where this machine has no such place."""
    where = choose_device(options.device)
    device = describe_device(where)
    identity = StudyIdentity(
        model=model, versions=versions(),
        device=device.model_copy(update={"memory_cap_bytes": options.memory_bytes}),
    )  # fmt: skip
    allocator, allocator_notes = _allocator(identity, options)
    check_world(where, options.base)
    devices = rank_devices(where, options.base)
    memory = find_budget(device, least_free(devices), options, len(devices))
    notes = [*(default_notes or allocator_notes), *memory.notes]
    if where == "cpu" and options.device == "auto":
        notes.insert(0, f"No GPU here ({why_no_gpu()}): tuning on the CPU ({device.name}).")
    return _Place(where, devices, identity, allocator, memory, notes)


def _open_study(
    model: Model, options: SearchOptions, place: _Place, made: FactoryAnswer | None
) -> tuple[ProbeStudy, Path]:
    """The study of the settings that are asked for, with the optimizer of the task where it makes
    one; and its folder. Raises UnsupportedError where another optimizer is named."""
    base, restrict = options.base, options.restrict
    if made is not None and made.has_optimizer:
        base = with_own_optimizer(base, restrict, model.title)
        restrict = {axis: v for axis, v in restrict.items() if axis != "optimizer"}
    space = make_space(
        model, place.identity.device, base, restrict=restrict,
        batch_sizes=options.batch_size, global_batch=options.global_batch, start=options.start,
    )  # fmt: skip
    output = make_folder(options.output or default_output(model))
    budget_bytes, title = place.memory.budget_bytes, f"planner {model.title}"
    return ProbeStudy(space, output / TUNE_PROBES, budget_bytes, options.storage, title), output


TORCHS_OWN = "expandable_segments:False"


def usual_options(device: str) -> tuple[str | None, list[str]]:
    """The allocator's options of probes on `device` where no option of `tune` and no variable of
    this environment names any: those that advice counts with, or None for torch's own. And notes.
    """
    is_cuda = device != "cpu" and (installed_build() or "rocm")[0].isdigit()
    if not is_cuda or any(name in os.environ for name in allocator_config.VARIABLES):
        return None, []
    if why := why_no_segments(device):
        return None, [f"Probes run without expandable segments, which fail on this device: {why}."]
    return EXPANDABLE, [
        "Probes run with expandable segments, as advice counts; --allocator "
        f"{TORCHS_OWN} is torch's own way."
    ]


def _hold_devices(stack: contextlib.ExitStack, place: _Place) -> list[str]:
    """Keeps other tuners off the devices while the stack lasts. Returns notes: which of differing
    cards is tuned, and whether another tuner is at it."""
    uuids = dict.fromkeys(uuid for name in place.devices if (uuid := describe_device(name).uuid))
    locks = [stack.enter_context(hold_gpu(uuid)) for uuid in uuids]
    shared = f"Another tuner is at {place.where}: both measure too slow, and share memory. End one."
    return [*filter(None, [name_card(place.where)]), *([] if all(locks) else [shared])]


def _allocator(
    identity: StudyIdentity, options: SearchOptions
) -> tuple[AllocatorConfig | None, list[str]]:
    """The caching allocator's options that probes run with, and notes on them.

    Raises UsageError for options that torch would not start with.
    """
    if identity.device.kind != "cuda":
        idle = "The allocator's options are those of CUDA's: they do nothing for probes on the CPU."
        return None, [idle] if options.allocator is not None else []
    try:
        config = allocator_config.recorded_allocator(identity.versions)
    except UnsupportedError as error:
        return None, [f"Memory is guessed as with torch's own allocator: {error.message}"]
    if config is None:
        return None, []
    return config, [f"Probes run with the allocator's options {config.source}."]


def default_output(model: Model) -> Path:
    """The output folder of a search that names none."""
    return Path("tune-" + re.sub(r"[^A-Za-z0-9_.]+", "-", model.title).strip("-")[:100])


# Recording a model may take this share of the time left before the first probe: a judgement. A
# recorded step took 0.2 to 1 s (models of timm, torch 2.14, 2026-11-29), and FEW_BATCHES of
# `planner.estimation.device_estimator` are recorded of each setting that is not on shapes.
RECORDING_SHARE = 0.25
# It may always take so many seconds, up to half of the time left: an import of torch and one
# recorded step of a small model took 7 to 12 s on two busy cores (torch 2.14, 2026-11-26).
RECORDING_SECONDS = 15.0
_PRIOR = TypeAdapter(Prior)


def device_prior(
    space: Space, model: Model, device: DeviceInfo, estimator: Estimator | Literal["auto"] | None,
    *, allocator: AllocatorConfig | None = None, seconds_left: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Prior, list[str]]:  # fmt: skip
    """The prior, and a note where there is no estimate.

    "auto" estimates by the catalogue's rates, with the caching allocator's options of the probes. A
    model that is no Swin of native, timm or microsoft is recorded for that, in another process and
    within a share of `seconds_left`; earlier recordings are read from the cache.
    """
    if estimator is None:
        return generic_prior(space, device), []
    if estimator != "auto":
        return estimated_prior(space, model, device, estimator), []
    estimator = DeviceEstimator(device, allocator)
    limit = None if seconds_left is None else recording_seconds(seconds_left)
    why = estimator.record(model, [c.setting for c in space.candidates], limit, say)
    if why:
        first = why.partition("\n")[0].rstrip(".")
        note = f"There is no estimate of {model.title} before the first probe: {first}."
        say(note)
        return generic_prior(space, device), [note]
    if any(
        not is_on_shapes(model, c.setting) or c.setting.world_size > 1 for c in space.candidates
    ):  # it depends on what could be recorded in the time left
        return estimated_prior(space, model, device, estimator), []
    key = _key(space, model, device, allocator)
    if isinstance(entry := cache.load(key), dict):
        return _PRIOR.validate_python(entry), []
    prior = estimated_prior(space, model, device, estimator)
    cache.store(key, _PRIOR.dump_python(prior, mode="json"))
    return prior, []


def _key(space: Space, model: Model, device: DeviceInfo, allocator: AllocatorConfig | None) -> Key:
    """The key of a prior in the cache: everything that decides it."""
    ids = ",".join(c.id for c in space.candidates)
    return {
        "title": f"{model.title} on {device.name}, before probes",
        "model": model.model_dump(mode="json"),
        "device": device.model_dump(mode="json", exclude={"uuid"}),
        "settings": hashlib.sha256(ids.encode()).hexdigest(),
        "allocator": repr(allocator),
        "source": source_digest((".", "../search/loop")),
    }


def recording_seconds(seconds_left: float) -> float:
    """How many of the seconds left recording may take."""
    return max(RECORDING_SHARE * seconds_left, min(RECORDING_SECONDS, PROBES_SHARE * seconds_left))


def with_own_optimizer(base: TrainSetting, restrict: Restriction, title: str) -> TrainSetting:
    """`base` for a task that makes its optimizer. Raises UnsupportedError where another is
    named."""
    optimizers = [str(v) for v in restrict.get("optimizer", (base.optimizer,))]
    if other := [v for v in optimizers if v not in ("adamw", OWN_OPTIMIZER)]:
        raise UnsupportedError(
            f"{title} makes its own optimizer, and not {other[0]}.",
            "Omit --optimizer, or take optimizer() out of the task.",
        )
    return base.model_copy(update={"optimizer": OWN_OPTIMIZER})


@dataclass(frozen=True)
class MemoryBudget:
    """The memory to search in: the bytes that a setting may take, the cap of a probe (None: none),
    and notes."""

    budget_bytes: int | None
    cap_bytes: int | None
    notes: tuple[str, ...]


def find_budget(
    device: DeviceInfo, in_use: MemoryInUse | None, options: SearchOptions, ranks: int = 1
) -> MemoryBudget:
    """The memory for a setting: the device's or the emulated size, less what other processes hold
    (`in_use`, None where that is not known) and the headroom. On the CPU `ranks` share it."""
    total = in_use.total_bytes if in_use else device.total_bytes
    used = in_use.used_bytes if in_use else 0
    free = in_use.free_bytes if in_use else total
    notes, which = [], " of this machine's memory" if device.kind == "cpu" else ""
    if used > noteworthy_bytes(total):
        notes.append(
            f"Other processes hold {format_bytes(used)} of {format_bytes(total)}{which}: "
            f"{format_bytes(free)} are left."
        )
    if device.kind == "cpu" and ranks > 1:
        free //= ranks
        notes.append(f"{ranks} ranks share this machine's memory: {format_bytes(free)} each.")
    limit = free
    if options.memory_bytes is not None:
        limit = min(free, options.memory_bytes)
        asked = format_bytes(options.memory_bytes)
        notes.append(
            f"Capped to {asked}: a smaller device, but with this one's speed and CUDA context."
            if options.memory_bytes < total
            else f"--memory {asked} caps nothing: this device has {format_bytes(total)}."
        )
    if device.kind == "cpu":
        notes.append("Memory on the CPU is the growth of the worker's peak resident set.")
    budget = less_headroom(limit, options.headroom)
    notes.append(f"Settings may take {format_bytes(budget)} ({options.headroom:.0%} kept free).")
    capped = options.memory_bytes is not None or device.kind == "cpu"
    return MemoryBudget(budget, limit if capped else None, tuple(notes))


def less_headroom(limit_bytes: int, headroom: float) -> int:
    """The bytes of `limit_bytes` that a setting may take. Raises UsageError where there are
    none."""
    budget = int(limit_bytes * (1 - headroom))
    if budget <= 0:
        law = f"no memory is left to search in: {format_bytes(limit_bytes)} less {headroom:.0%}."
        raise UsageError(law, "Free the device of other processes, or lower --headroom.")
    return budget
