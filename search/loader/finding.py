"""find_loader(): the loader that feeds a training fastest here, found by running some."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Unpack

from planner.core.errors import UsageError
from planner.core.files import DATA_PROBES, DATA_RESULT
from planner.core.schema import Model
from planner.core.schema.loading import (
    DataRecommendation,
    DataSource,
    LoaderRecord,
    LoaderSetting,
    StepRate,
)
from planner.estimation.arguments import ModelLike, read_gpu, read_model
from planner.estimation.estimate import estimate
from planner.machine.host import Host, read_host
from planner.training.loading.sources import find_source
from search.loader.advice import Advised, all_faults, bound_line, warnings_of, ways_out
from search.loader.options import LoaderKeywords, LoaderOptions
from search.loader.pictures import smaller_share
from search.loader.prober import LoaderProber
from search.loader.probing import PACKAGES
from search.loader.result import choose_loader, measured_loaders
from search.loader.space import is_plain_loader, make_loader_space
from search.loader.strategy import LoaderStrategy, SkipUnsupported
from search.loader.study import LoaderIdentity
from search.loop.interrupts import ENDINGS, handle_signals
from search.loop.limits import Limits
from search.loop.prober import Prober
from search.loop.progress import OnProgress, note_taker
from search.loop.result.recommend import how_ended
from search.loop.result_file import make_folder, write_result
from search.loop.session import Session
from search.loop.space import Space
from search.loop.strategies.in_order import ListStrategy
from search.loop.strategies.optuna_sampler import SamplerStrategy, tpe_sampler
from search.loop.strategies.strategy import Choice, Strategy
from search.loop.study.lock import hold_gpu
from search.loop.study.optuna_study import open_study
from search.probe.device import choose_device, describe_device, versions
from search.probe.evidence import others_ran

IMAGE_SIZE = (224, 224)
# A probe that takes longer is hung: the start of its processes took under ten seconds on two busy
# cores, and it takes so many batches of each worker to warm up and to be timed.
START_SECONDS = 90.0
ROUNDS_TO_WAIT = 12
MAX_DEADLINE_SECONDS = 900.0
# What PIL takes to decode a photograph of ImageNet's size and torchvision to crop it, in seconds of
# one processor: an assumption, and only until the first probe has said what it is here.
ASSUMED_IMAGE_SECONDS = 0.01

LoaderProbe = Prober[LoaderSetting, LoaderRecord]
LoaderProgress = OnProgress[LoaderSetting, LoaderRecord]


def find_loader(
    data: str | PathLike[str] | DataSource,
    *,
    model: ModelLike | None = None,
    gpu: str | None = None,
    prober: LoaderProbe | None = None,
    on_progress: LoaderProgress = lambda progress: None,
    **options: Unpack[LoaderKeywords],
) -> DataRecommendation:
    """Probes loaders of `data` on this machine until the fastest is known; what it ran is what it
    recommends.

    `data` is a folder, tar shards, a table, MODULE:FACTORY or a DataSource. `model` gives the size
    of its images, and with `gpu` what its step takes by the estimate, and so which of the two
    bounds. `batch_size`, `image_size`, `pipelines`, `workers` and `prefetch` hold what is
    searched. It ends after `trials` probes in the study, `budget_seconds` (those that earlier runs
    took included), or when all loaders beside the fastest are probed; workers are doubled while
    that gains `tolerance` (a share). `output` (default data-NAME) receives data.json, loader.jsonl
    and, unless `storage` names another place, study.db; the same call goes on from there. `prober`
    runs a probe in place of a process. Ctrl-C ends with the best so far. Nothing is written into
    the data. Raises UsageError, UnsupportedError, StudyError, RecordsNotWrittenError and
    ResultNotWrittenError (PlannerErrors all).
    """
    asked, chosen = read_question(model, gpu, options)
    source = data if isinstance(data, DataSource) else find_source(fspath(data))
    with handle_signals(signal.SIGINT):
        return _probed(source, asked, chosen, gpu, prober, on_progress)


def read_question(
    model: ModelLike | None, gpu: str | None, options: LoaderKeywords
) -> tuple[LoaderOptions, Model | None]:
    """All that is asked but the data: what is wrong with it is said before any are made. Raises
    UsageError."""
    asked = LoaderOptions.of(options)
    if gpu is not None and model is None:
        raise UsageError("--gpu says whose step is to be fed, and no model is named.", "Add --for.")
    read_gpu(gpu)
    describe_device(asked.device)  # raises where it cannot be used
    return asked, None if model is None else read_model(model, {})


def _probed(
    source: DataSource, asked: LoaderOptions, model: Model | None, gpu: str | None,
    prober: LoaderProbe | None, on_progress: LoaderProgress,
) -> DataRecommendation:  # fmt: skip
    host, where = read_host(), choose_device(asked.device)
    size = asked.image_size or _image_size(model) or IMAGE_SIZE
    space = make_loader_space(
        source, host, asked.batch_size, size, has_cuda=where != "cpu", pipelines=asked.pipelines,
        workers=asked.workers, prefetch_factors=asked.prefetch,
    )  # fmt: skip
    step = _step_rate(model, gpu, asked.batch_size, size)
    processor = describe_device("cpu").name
    identity = LoaderIdentity(source, host, processor, versions(PACKAGES))
    output = make_folder(asked.output or Path(_slug(source)))
    study = open_study(
        asked.storage, space, LoaderRecord, output / DATA_PROBES, name=asked.study_name
    )
    notes = study.take_over(identity, asked.accept_different)
    limits = Limits(asked.trials, asked.budget_seconds)
    limits.charge(study.records())
    say = note_taker(on_progress)
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(hold_gpu("loader")):
            notes.append("Another search for a loader runs on this machine: both measure too slow.")
        for note in (*space.left_out, *notes):
            say(note)
        if prober is None:
            own = LoaderProber(source, where, space, on_progress)
            prober = stack.enter_context(own)
        session = Session(
            space, study, _stamping(prober, identity), limits, deadline(host), None, on_progress,
            is_plain_loader,
        )  # fmt: skip
        say(f"{len(space)} loaders; {asked.batch_size} images of {size[0]}×{size[1]} px a batch.")
        strategy = make_strategy(asked, space)
        stopped, said = session.run_to_end(lambda: session.run(strategy))
    found = recommend(session, identity, step, [*notes, *said], stopped)
    write_result(output / DATA_RESULT, found, study.spilled or study.records_path)
    study.attach(output / DATA_RESULT)
    return found


def make_strategy(
    asked: LoaderOptions, space: Space[LoaderSetting]
) -> Strategy[LoaderSetting, LoaderRecord]:
    if asked.strategy == "planner":
        return LoaderStrategy(space, asked.tolerance)
    if asked.strategy == "grid":
        return SkipUnsupported(ListStrategy(space.candidates), space)
    return SkipUnsupported(SamplerStrategy(space, tpe_sampler(asked.seed), None), space)


def deadline(host: Host) -> Callable[[Choice[LoaderSetting]], float]:
    """Seconds after which a probe is hung and not slow, by the slowest probe so far."""

    def seconds(choice: Choice[LoaderSetting]) -> float:
        setting = choice.candidate.setting
        processes = max(setting.workers, 1)
        rate = choice.expected_rate or min(processes, host.cpus) / ASSUMED_IMAGE_SECONDS
        batches = processes * (ROUNDS_TO_WAIT + (setting.prefetch_factor or 0))
        return START_SECONDS + min(2 * batches * setting.batch_size / rate, MAX_DEADLINE_SECONDS)

    return seconds


def recommend(
    session: Session[LoaderSetting, LoaderRecord], identity: LoaderIdentity,
    step: StepRate | None, notes: Sequence[str], stopped: str,
) -> DataRecommendation:  # fmt: skip
    """The recommendation that a session's records prove; advice where nothing loads."""
    records, source, host = session.in_space(), identity.data, identity.host
    left_out = (*session.space.left_out, *_unsupported(session.space, records))
    common: dict[str, Any] = {
        "data": source,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": identity.telling_host(),
        "versions": identity.versions,
        "num_probes": len(records),
        "num_candidates": len(session.space),
        "stopped_because": stopped,
        "warnings": tuple(warnings_of(host, source, records)),
        "faults": all_faults(source, records),
        "left_out": left_out,
    }
    found = measured_loaders(records)
    if not found:
        advice = _advice(session.records, records, stopped)
        return DataRecommendation(
            setting=None, evidence=None, notes=tuple(notes), advice=advice, **common
        )
    best = choose_loader(found)
    chosen, others = best.evidence, [loader.evidence for loader in found if loader is not best]
    rated = _rated(step, best.rate, chosen)
    advised = Advised(
        chosen, [loader.evidence for loader in found], host, source, smaller_share(source), rated,
        frozenset(r.setting.pipeline for r in records if r.status == "unsupported"),
    )  # fmt: skip
    said = [
        bound_line(advised),
        _plainer_note(found[0].evidence, chosen),
        _start_note(chosen),
        *(
            f"Of its probe: {flag.rstrip('?.')}."
            for flag in chosen.flags
            if flag != others_ran(chosen.flags)  # a warning says it
        ),
        *notes,
    ]
    return DataRecommendation(
        setting=best.setting,
        evidence=chosen,
        runners_up=tuple(others),
        step=rated,
        ways_out=tuple(ways_out(advised)),
        notes=tuple(note for note in said if note),
        **common,
    )


def _unsupported(space: Space[LoaderSetting], records: Sequence[LoaderRecord]) -> Iterator[str]:
    """A line for each pipeline that cannot run here, as its probe said."""
    said = {r.setting.pipeline: r.message for r in records if r.status == "unsupported"}
    for pipeline, message in said.items():
        count = sum(c.setting.pipeline == pipeline for c in space.candidates)
        yield f"{count} loaders left out: {' '.join(message.split())}"


def _rated(step: StepRate | None, rate: float, chosen: LoaderRecord) -> StepRate | None:
    """Which of step and loader bounds, now that the loader is measured."""
    if step is None:
        return None
    cpu = chosen.cpu_seconds_per_image
    return step.model_copy(
        update={
            "bound": "loader" if rate < step.images_per_second else "step",
            "needed_cpus": step.images_per_second * cpu if cpu else None,
        }
    )


def _step_rate(
    model: Model | None, gpu: str | None, batch_size: int, size: tuple[int, int]
) -> StepRate | None:
    """What a step of the model takes on a GPU by the estimate, at the size that is loaded."""
    if model is None or gpu is None:
        return None
    fields: dict[str, Any] = {"image_size": size} if hasattr(model, "image_size") else {}
    found = estimate(model, gpu=gpu, batch_size=batch_size, **fields)
    time = found.throughput
    if time is None:
        raise UsageError(f"no rate is known of {gpu}.", "List GPUs with 'planner gpus'.")
    return StepRate(
        model=found.model.title,
        gpu=gpu,
        setting=found.setting,
        images_per_second=time.images_per_second,
        uncertainty=time.uncertainty,
        bound="loader",
    )


def _image_size(model: Model | None) -> tuple[int, int] | None:
    size = getattr(model, "image_size", None)
    return (size[0], size[1]) if size else None


def _plainer_note(fastest: LoaderRecord, chosen: LoaderRecord) -> str:
    if fastest.setting == chosen.setting:
        return ""
    rate, less = fastest.images_per_second or 0.0, chosen.images_per_second or 1.0
    return (
        f"{fastest.setting.title} measured {rate / less - 1:.1%} faster, which is within the noise:"
        " the plainer loader is recommended."
    )


def _start_note(chosen: LoaderRecord) -> str:
    seconds = chosen.first_batch_seconds
    if not chosen.setting.workers or seconds is None:
        return ""
    return (
        f"Workers that persist start once: without, every epoch would begin {seconds:.2g} s later."
    )


def _advice(
    everything: Sequence[LoaderRecord], records: Sequence[LoaderRecord], stopped: str
) -> str:
    """What to do where nothing loads, from how the probes ended."""
    if not records and everything:
        return (
            f"No probe of these loaders was made: {stopped}. --trials and --budget count all "
            f"{len(everything)} probes of the study: allow more, or name another --output."
        )
    if not records and stopped in ENDINGS.values():
        return "No probe was made before that: run the same command again."
    if not records or all(r.cut_short for r in records):
        longest = max(records, key=lambda r: r.probe_seconds, default=None)
        said = f" (the longest: {longest.message})" if longest and longest.message else ""
        return f"The budget ended before any probe did{said}: allow more time with --budget."
    return how_ended([r for r in records if not r.cut_short])


def _stamping(prober: LoaderProbe, identity: LoaderIdentity) -> LoaderProbe:
    def stamped(
        choice: Choice[LoaderSetting], probe_id: str, deadline_seconds: float
    ) -> LoaderRecord:
        return identity.stamped(prober(choice, probe_id, deadline_seconds))

    return stamped


def _slug(source: DataSource) -> str:
    name = Path(source.location).name if source.kind != "factory" else source.location
    return "data-" + (re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:100] or "here")
