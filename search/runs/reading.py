"""A search read from what it left: a folder, or one file of it.

What cannot be read is told and does not keep the rest from being shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from planner.core.errors import PlannerError, UsageError, refuse_if
from planner.core.files import (
    MAX_RESULT_BYTES,
    TUNE_PROBES,
    TUNE_RESULT,
    parse_json,
    read_text,
)
from planner.core.schema import MeasurementRecord, SwinConfig
from planner.core.schema.record import Recommendation
from planner.core.units import GIB
from planner.libraries.registry import find_library
from planner.report.estimates import apart_fields
from planner.report.searches import Run, cited
from planner.trainers.emission import read_result
from search.loop.options import model_flags, read_options, tune_command
from search.loop.records import read_records
from search.probe.evidence import is_disturbed, is_feasible, rate_interval

if TYPE_CHECKING:
    from optuna import Study

STORAGES = (".db", ".journal", ".log")
MOST_NAMED = 6
_WAY_OUT = "Name the --output of a 'planner tune', a file of records, or a MODEL."

T = TypeVar("T")


def is_run(target: str) -> bool:
    """Whether a target is a search: a folder, a file of records or of a recommendation. Whatever
    else there is may be a MODEL, which can be a JSON file too."""
    path = Path(target)
    try:
        if path.is_dir() or path.suffix == ".jsonl":
            return True
        return path.suffix == ".json" and path.is_file() and _is_result(path)
    except (OSError, ValueError):  # a name that no file can have
        return False


def _is_result(path: Path) -> bool:
    """Whether a JSON file is a recommendation."""
    if path.name == TUNE_RESULT:
        return True
    try:
        data = parse_json(read_text(path, MAX_RESULT_BYTES), str(path))
    except UsageError:
        return False
    return isinstance(data, dict) and "num_probes" in data


def refuse_storage(target: str) -> None:
    """Raises UsageError for the storage of a study: who shares one leaves a run of all of it."""
    refuse_if(
        "://" in target or target.endswith(STORAGES),
        "a page draws a run, and not the storage of its study.",
        "Name the --output of any of its tuners, which has the probes of all; optuna-dashboard "
        "shows a storage.",
    )


def interval_of(record: MeasurementRecord) -> tuple[float, float] | None:
    """Where its rate lies; None where nothing was timed."""
    images = record.setting.batch_size * record.setting.accumulate
    return rate_interval(images, record.samples) if record.samples else None


def read_run(target: str | Path) -> Run:
    """What is known of a search. Raises UsageError where nothing of it can be read."""
    path = Path(target)
    faults: list[str] = []

    def tried(read: Callable[[], T]) -> T | None:
        try:
            return read()
        except PlannerError as error:
            faults.append(error.message)
            return None

    found, file = None, None
    if path.is_dir() or path.name in (TUNE_RESULT, TUNE_PROBES):
        path = path if path.is_dir() else path.parent
        if (path / TUNE_RESULT).exists():
            found = tried(lambda: read_result(path / TUNE_RESULT))
        file = tried(lambda: read_records(path / TUNE_PROBES))
    elif not path.exists():
        raise UsageError(f"{path} does not exist.", _WAY_OUT)
    elif path.suffix == ".json":
        found = read_result(path)
    else:
        file = tried(lambda: read_records(path))
    if file is not None and file.fault:
        faults.append(f"{file.fault}; what stands before it was read.")
    records = file.records if file is not None else ()
    if found or records:
        return make_run(str(path), found, records, faults)
    law = "\n".join(faults) or f"{path} holds no search: no {TUNE_RESULT}, no probes."
    raise UsageError(law, _WAY_OUT)


def make_run(
    place: str, found: Recommendation | None, records: tuple[MeasurementRecord, ...],
    faults: Sequence[str] = (),
) -> Run:  # fmt: skip
    """A search that recommends what was `found`, None while it runs."""
    faults = [*faults]
    if found and not records and (records := cited(found)):
        faults.append(
            f"{TUNE_PROBES} was not read: only the {len(records)} probes that the recommendation "
            "cites are shown."
        )
    if records and (mixture := describe_mixture(records)):
        faults.append(mixture)
    disturbed = frozenset(r.probe_id for r in records if is_disturbed(r))
    run = Run(
        place, found, records, found.evidence if found else None, interval_of,
        search_again(found, place), tuple(faults), disturbed,
    )  # fmt: skip
    if not records:
        return run
    ran = [r for r in records if is_feasible(r, run.budget_bytes)]
    fastest = max(ran, key=lambda r: r.images_per_second or 0.0, default=None)
    is_within = partial(is_feasible, budget_bytes=run.budget_bytes)
    return replace(run, best=run.best or fastest, studies=studies_of(records, is_within))


def describe_mixture(records: Sequence[MeasurementRecord]) -> str | None:
    """In what the models, devices and software of records differ, as one sentence; None where all
    are of one environment."""
    from search.loop.study import Identity

    first, *others = map(Identity.of, records)
    found = dict.fromkeys(line for other in others for line in other.differences(first))
    if not found:
        return None
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    named = "; ".join([*found][:MOST_NAMED])
    return f"These records are of several environments: {named}{more}."


def search_again(found: Recommendation | None, place: str) -> str:
    """The command that goes on; "" where no result keeps what was asked, or a name does not say the
    model."""
    if found is None:
        return ""
    try:
        asked = read_options(found.asked or {})
    except UsageError:
        return ""
    model = found.model
    if isinstance(model, SwinConfig):
        named = find_library(model.library).find(model.name or "")
        if named != model:  # another Swin of the same name
            return ""
    asked = asked.model_copy(update={"output": asked.output or Path(place)})
    return tune_command(model.title, asked, model_flags(model))


def studies_of(
    records: Sequence[MeasurementRecord], is_within: Callable[[MeasurementRecord], bool]
) -> tuple[Study, Study]:
    """By images/s, and by memory in GiB and images/s. The parameters are the axes that were varied;
    what measured no value has failed, and what is not within the budget breaks a constraint."""
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    axes = apart_fields([record.setting for record in records])
    names = {axis: "batch" if axis == "batch_size" else axis.replace("_", " ") for axis in axes}
    known = {names[axis]: _distribution(records, axis) for axis in axes}
    alone = optuna.create_study(directions=["maximize"])
    both = optuna.create_study(directions=["minimize", "maximize"])
    for study in (alone, both):  # Optuna counts from 0, our tables from 1
        study.add_trial(create_trial(state=TrialState.FAIL))
    for record in records:
        size = record.used_bytes and record.used_bytes / GIB
        rate = record.images_per_second
        for study, values in ((alone, (rate,)), (both, (size, rate))):
            ran = record.status == "measured" and None not in values
            study.add_trial(
                create_trial(
                    state=TrialState.COMPLETE if ran else TrialState.FAIL,
                    values=[v for v in values if v is not None] if ran else None,
                    params={names[axis]: _value(record, axis) for axis in axes},
                    distributions=known,
                    constraints={"budget": float(not is_within(record))},
                )
            )
    return alone, both


def _distribution(records: Sequence[MeasurementRecord], axis: str) -> Any:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    values = [_value(record, axis) for record in records]
    if all(type(value) is int for value in values):
        return IntDistribution(min(values), max(values), log=axis == "batch_size")
    return CategoricalDistribution(sorted(set(values), key=str))


def _value(record: MeasurementRecord, axis: str) -> Any:
    """What a parameter of a study may be: other values as texts."""
    value = getattr(record.setting, axis)
    return value if isinstance(value, str | int | float | None) else str(value)
