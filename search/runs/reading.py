"""A search read from what it left: a folder, or one file of it.

What cannot be read is told and does not keep the rest from being shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from planner.core.errors import PlannerError, UsageError, refuse_if
from planner.core.files import (
    MAX_RESULT_BYTES,
    TUNE_PROBES,
    TUNE_RESULT,
    parse_json,
    read_text,
)
from planner.core.schema import MeasurementRecord
from planner.core.schema.record import Recommendation
from planner.report.searches import Run, cited
from planner.trainers.emission import read_result
from search.loop.records import read_records
from search.probe.evidence import is_disturbed, is_feasible, rate_interval

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
    return rate_interval(images, record.step_seconds) if record.step_seconds else None


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
        tuple(faults), disturbed,
    )  # fmt: skip
    ran = [r for r in records if is_feasible(r, run.budget_bytes)]
    fastest = max(ran, key=lambda r: r.images_per_second or 0.0, default=None)
    return replace(run, best=run.best or fastest)


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
