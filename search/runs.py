"""Runs: a search as it is read from the files that it left; and `search.write_report`, a page of
runs and models in one call. A file that cannot be read is named, and the rest is shown.
"""

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from planner.core import files
from planner.core.errors import PlannerError, UsageError, refuse_if, shorten
from planner.core.schema import MeasurementRecord, Model, ResolvedSetting
from planner.core.schema.record import Recommendation
from planner.estimation.arguments import (
    MODEL_FIELDS,
    ModelLike,
    SettingLike,
    Target,
    read_target,
)
from planner.estimation.estimate import estimate_ledger, read_resolved
from planner.estimation.ledgers import step_ledger
from planner.estimation.predicted import is_predicted
from planner.libraries.names import CONFIG_SUFFIXES, resolve_model
from planner.machine.hardware import Gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.report.page.contents import Page
from planner.report.page.rendering import is_page, page_html
from planner.report.pages import Subject, make_page
from planner.report.searches import SearchRun, cited_records
from planner.report.step import PredictedStep
from planner.report.text import describe_setting
from planner.trainers.emission import read_result
from search.loop.records import read_records
from search.probe.evidence import is_disturbed, is_feasible, rate_interval

ReportTarget = ModelLike | SearchRun | PredictedStep
_START_BYTES = 2000  # of a file, in which a page says that it is one
MAX_SUBJECTS = 100  # of one page: more make a table of `planner estimate`
WHAT_A_RUN_IS = (
    "A RUN is the --output of a 'planner tune'; a MODEL is LIBRARY:NAME, see 'planner models'."
)


def write_report(
    targets: ReportTarget | Sequence[ReportTarget],
    output: str | os.PathLike[str] = "report.html",
    *,
    title: str = "",
    force: bool = False,
    gpu: str | Gpu | Sequence[str | Gpu] | None = None,
    **options: Any,
) -> Path:
    """Writes one HTML page of `targets`, as `planner report` does, and returns its path.

    A target is a run (the `output` of `search.tune`), a model as `planner.estimate` takes it, or a
    result of `report_estimate`. Models are estimated on each `gpu`, with the `options` of
    `planner.estimate`. `force` replaces a file that is no page of ours.

    Raises UsageError and PlannerError, if possible before it estimates anything.
    """
    several = isinstance(targets, Sequence) and not isinstance(targets, str)
    listed: list[ReportTarget] = list(targets) if several else [targets]  # type: ignore[arg-type,list-item]
    if not listed:
        raise UsageError("a report needs a run or a model.", "Name one at least.")
    path = check_page(output, force)
    names = [os.fspath(t) for t in listed if isinstance(t, str | os.PathLike)]
    for name in names:
        check_target(name)
    cards = list(gpu) if isinstance(gpu, Sequence) and not isinstance(gpu, str) else [gpu]
    if len(names) == len(listed):
        check_options({"gpu": gpu, **options}, names)
    subjects: list[Subject] = []
    for target in listed:
        if isinstance(target, SearchRun | PredictedStep):
            subjects.append(target)
        elif isinstance(target, str | os.PathLike) and is_run(os.fspath(target)):
            subjects.append(read_run(os.fspath(target)))
        else:
            subjects += [report_estimate(target, gpu=card, **options) for card in cards]
    check_subjects(subjects)
    return write_page(make_page(subjects, title), path, force)


def report_estimate(
    model: ModelLike,
    setting: SettingLike | None = None,
    *,
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    allocator: str | AllocatorConfig | None = None,
    link: str | None = None,
    recorded: bool = False,
    **overrides: Any,
) -> PredictedStep:
    """An estimate with its ledger, for `write_report`; its arguments are `planner.estimate`'s."""
    target = read_target(gpu, memory_bytes, allocator, link, recorded)
    config, chosen = read_resolved(model, setting, target.gpu, overrides)
    step = predicted_step(config, chosen, target)
    typed = {name: str(value) for name, value in overrides.items() if name in MODEL_FIELDS}
    return replace(step, model_text=model if isinstance(model, str) else "", fields=typed)


def predicted_step(model: Model, setting: ResolvedSetting, target: Target) -> PredictedStep:
    """An estimate with its ledger, from arguments that were read."""
    ledger = step_ledger(model, setting, target.recorded, target.gpu)
    return PredictedStep(estimate_ledger(model, setting, ledger, target), ledger, target)


def check_target(target: str) -> None:
    """Raises UsageError where a target is neither a run nor a model."""
    path = files.named_path(target, "target")
    refuse_if(  # each tuner that shares one leaves a run of all its probes
        "://" in target or target.endswith((".db", ".journal", ".log")),
        "a page draws a run, and not the storage of its study.",
        "Name the --output of any of its tuners, which has the probes of all; optuna-dashboard "
        "shows a storage.",
    )
    if is_run(target) or ":" in target:  # errors of LIBRARY:NAME and factories name what is wrong
        return
    if path.suffix == ".json" and path.is_file():
        shown = shorten(target)
        refuse_if(
            is_predicted(files.parse_json(files.read_text(path, files.MAX_RESULT_BYTES), shown)),
            f"{shown} holds an estimate or advice, and a page draws a run or a model.",
            "Write: planner report MODEL, with the options of 'planner estimate'.",
        )
    if path.exists() and target.lower().endswith(CONFIG_SUFFIXES):  # options may still complete it
        return
    try:
        resolve_model(target)
    except UsageError as error:
        raise UsageError(error.message, WHAT_A_RUN_IS) from None


def check_options(options: Mapping[str, object], targets: Sequence[str]) -> None:
    """Raises UsageError for options of a MODEL, by name as they are typed, where none is named."""
    idle = [option for option, value in options.items() if value]
    refuse_if(
        bool(idle) and all(map(is_run, targets)),
        f"{', '.join(idle)}: nothing is estimated, since only runs are named.",
        "Omit it, or name a MODEL beside the RUN.",
    )


def check_subjects(subjects: Sequence[Subject]) -> None:
    """Raises UsageError where a subject is named twice, and where there are too many."""
    refuse_if(
        len(subjects) > MAX_SUBJECTS,
        f"a page compares {MAX_SUBJECTS} estimates and runs at most, and more were named.",
        "Name fewer values; 'planner estimate' prints a table of any number.",
    )
    identities: set[Hashable] = set()
    for subject in subjects:
        if isinstance(subject, SearchRun):
            identity: Hashable = Path(subject.place).resolve()
            name = f"the run {shorten(subject.place)}"
        else:
            estimate = subject.estimate
            identity = (repr(estimate), repr(subject.target.allocator), subject.target.link)
            setting = describe_setting(estimate.setting, estimate.model)
            name = f"{subject.title} with {setting}"
        refuse_if(identity in identities, f"{name} is named twice.", "Name each once.")
        identities.add(identity)


def check_page(output: str | os.PathLike[str], force: bool = False) -> Path:
    """The file to which a page can be written. Raises as `check_output`, and PlannerError for a
    file that is no page of ours, unless `force` replaces it."""
    path = files.check_output(output, "a page", (".html", ".htm"))
    shown = shorten(str(path))
    try:
        if path.exists() and not path.is_file():
            raise PlannerError(f"{shown} is no file that can be replaced.", "Name another file.")
        if not force and (path.is_symlink() or (path.exists() and _is_no_page(path))):
            raise PlannerError(
                f"{shown} exists, and 'planner report' did not write it.",
                "Name another file, or remove this one ('planner report --force' replaces it).",
            )
    except OSError as error:
        raise files.unwritable(path, error) from None
    return path


def _is_no_page(path: Path) -> bool:
    """Whether a file is neither empty nor a page, so that somebody would miss it."""
    with path.open("rb") as file:
        start = file.read(_START_BYTES)
    return bool(start) and not is_page(start.decode(errors="replace"))


def write_page(page: Page, output: str | os.PathLike[str], force: bool = False) -> Path:
    """Writes the page, whole or not at all. Raises what `check_page` raises."""
    return files.write_output(check_page(output, force), page_html(page).encode())


MAX_DIFFERENCES = 6
_WAY_OUT = "Name the --output of a 'planner tune', a file of records, or a MODEL."

T = TypeVar("T")


def is_run(target: str) -> bool:
    """Whether a target is a run: a folder, or a file of records or of a recommendation. Anything
    else may be a MODEL, which can be a JSON file too."""
    path = Path(target)
    try:
        if path.is_dir() or path.suffix == ".jsonl":
            return True
        return path.suffix == ".json" and path.is_file() and _is_result(path)
    except (OSError, ValueError):  # a name that no file can have
        return False


def _is_result(path: Path) -> bool:
    """Whether a JSON file is a recommendation."""
    if path.name == files.TUNE_RESULT:
        return True
    try:
        data = files.parse_json(files.read_text(path, files.MAX_RESULT_BYTES), str(path))
    except UsageError:
        return False
    return isinstance(data, dict) and "num_probes" in data


def interval_of(record: MeasurementRecord) -> tuple[float, float] | None:
    """The interval of a record's rate; None where nothing was timed."""
    images = record.setting.images_per_device_step
    return rate_interval(images, record.step_seconds) if record.step_seconds else None


def read_run(target: str | Path) -> SearchRun:
    """The run in a folder or file. Raises UsageError where nothing of it can be read."""
    path = Path(target)
    faults: list[str] = []

    def try_to(read: Callable[[], T]) -> T | None:
        try:
            return read()
        except PlannerError as error:
            faults.append(error.message)
            return None

    result, file = None, None
    if path.is_dir() or path.name in (files.TUNE_RESULT, files.TUNE_PROBES):
        path = path if path.is_dir() else path.parent
        if (path / files.TUNE_RESULT).exists():
            result = try_to(lambda: read_result(path / files.TUNE_RESULT))
        file = try_to(lambda: read_records(path / files.TUNE_PROBES))
    elif not path.exists():
        raise UsageError(f"{path} does not exist.", _WAY_OUT)
    elif path.suffix == ".json":
        result = read_result(path)
    else:
        file = try_to(lambda: read_records(path))
    if file is not None and file.fault:
        faults.append(f"{file.fault}; what stands before it was read.")
    records = file.records if file is not None else ()
    if result or records:
        return make_run(str(path), result, records, faults)
    law = "\n".join(faults) or f"{path} holds no search: no {files.TUNE_RESULT}, no probes."
    raise UsageError(law, _WAY_OUT)


def make_run(
    place: str, result: Recommendation | None, records: tuple[MeasurementRecord, ...],
    faults: Sequence[str] = (),
) -> SearchRun:  # fmt: skip
    """A run with its result; None while it goes on."""
    faults = [*faults]
    if result and not records and (records := cited_records(result)):
        faults.append(
            f"{files.TUNE_PROBES} was not read: only the {len(records)} probes that the "
            "recommendation cites are shown."
        )
    if records and (mixture := describe_mixture(records)):
        faults.append(mixture)
    disturbed = frozenset(r.probe_id for r in records if is_disturbed(r))
    run = SearchRun(
        place, result, records, result.evidence if result else None, interval_of,
        tuple(faults), disturbed,
    )  # fmt: skip
    ran = [r for r in records if is_feasible(r, run.budget_bytes)]
    fastest = max(ran, key=lambda r: r.images_per_second or 0.0, default=None)
    return replace(run, best=run.best or fastest)


def describe_mixture(records: Sequence[MeasurementRecord]) -> str | None:
    """A sentence that says in what the models, devices and software of records differ; None where
    all are of one environment."""
    from search.loop.study import StudyIdentity

    first, *others = map(StudyIdentity.of, records)
    lines = list(dict.fromkeys(line for other in others for line in other.differences(first)))
    if not lines:
        return None
    more = f"; and {len(lines) - MAX_DIFFERENCES} more" if len(lines) > MAX_DIFFERENCES else ""
    differences = "; ".join(lines[:MAX_DIFFERENCES])
    return f"These records are of several environments: {differences}{more}."
