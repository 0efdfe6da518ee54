"""A search read from what it left: a folder, one file of it, or the storage of its study.

What cannot be read is told and does not keep the rest from being shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from planner.core.errors import PlannerError, UsageError
from planner.core.files import (
    MAX_RESULT_BYTES,
    STUDY,
    TUNE_PROBES,
    TUNE_RESULT,
    parse_json,
    read_text,
)
from planner.core.schema import MeasurementRecord
from planner.core.schema.result import Recommendation
from planner.trainers.emission import read_result
from search.loop.study.records import read_records
from search.report.run import Run

FILES = (TUNE_RESULT, TUNE_PROBES, STUDY)
STORAGES = (".db", ".journal", ".log")
_SQLITE = "sqlite:///"

T = TypeVar("T")


def is_run(target: str) -> bool:
    """Whether a target is a search: a folder, a file of records or of a recommendation, a storage.
    Whatever else there is may be a MODEL, which can be a JSON file too."""
    path = Path(target)
    try:
        if "://" in target or path.is_dir() or path.suffix in (".jsonl", *STORAGES):
            return True
        return path.suffix == ".json" and path.is_file() and _is_result(path)
    except (OSError, ValueError):  # a name that no file can have
        return False


def read_run(target: str | Path, study_name: str | None = None) -> Run:
    """What is known of a search. Raises UsageError where nothing of it can be read."""
    path, text = Path(target), str(target)
    if "://" in text or path.suffix in STORAGES:
        run = _of_storage(text, study_name)
    elif path.is_dir() or path.name in FILES:
        run = _of_folder(path if path.is_dir() else path.parent, study_name)
    elif not path.exists():
        raise UsageError(f"{path} does not exist.", _WAY_OUT)
    elif path.suffix == ".json":
        run = _of_result(path)
    else:
        run = _of_records(path)
    if run.found or run.records:
        return run
    why = "\n".join(run.faults)
    raise UsageError(why or f"{path} holds no search: no {TUNE_RESULT}, no probes.", _WAY_OUT)


_WAY_OUT = "Name the --output of a 'planner tune', a file of records, or a MODEL."


@dataclass
class _Reader:
    """Reads one thing after the other and keeps what was wrong with them."""

    faults: list[str] = field(default_factory=list)

    def result(self, read: Callable[[Path], T], path: Path) -> T | None:
        """What a JSON file holds, None where there is none or it cannot be read."""
        if not path.exists():
            return None
        try:
            return read(path)
        except PlannerError as error:
            self.faults.append(error.message)
            return None

    def records(self, path: Path) -> tuple[MeasurementRecord, ...]:
        """The records of a file up to its first fault."""
        try:
            file = read_records(path)
        except PlannerError as error:
            self.faults.append(error.message)
            return ()
        if file.fault:
            self.faults.append(f"{file.fault}; what stands before it was read.")
        return file.records


def _of_folder(folder: Path, study_name: str | None) -> Run:
    reader = _Reader()
    found = reader.result(read_result, folder / TUNE_RESULT)
    records = reader.records(folder / TUNE_PROBES)
    run = Run(folder, found, records)
    kept = folder / STUDY
    if kept.is_file():
        run = _with_study(run, f"{_SQLITE}{kept}", study_name, reader)
    if not run.records and run.cited:
        reader.faults.append(
            f"{TUNE_PROBES} is not there: only the {len(run.cited)} probes that {TUNE_RESULT} "
            "cites are shown."
        )
        run = replace(run, records=run.cited)
    return replace(run, faults=tuple(reader.faults))


def _of_storage(storage: str, study_name: str | None) -> Run:
    from search.loop.study.storage import hidden_password

    reader, path = _Reader(), Path(storage.removeprefix(_SQLITE))
    is_file = "://" not in storage.removeprefix(_SQLITE)
    if is_file and not path.exists():  # Optuna would make it
        raise UsageError(f"{path} does not exist.", _WAY_OUT)
    if is_file and path.suffix == ".db":
        storage = f"{_SQLITE}{path}"
    run = Run(path.parent if is_file else Path(), None, (), name=hidden_password(storage))
    run = _with_study(run, storage, study_name, reader)
    return replace(run, faults=tuple(reader.faults))


def _with_study(run: Run, storage: str, study_name: str | None, reader: _Reader) -> Run:
    """The run with what only its study knows: who made a probe, and probes that the file lacks."""
    from search.report.kept_study import read_study

    try:
        kept = read_study(storage, study_name)
    except PlannerError as error:
        reader.faults.append(f"The study was not read: {error.message}")
        return run
    reader.faults += kept.faults
    known = {record.probe_id for record in run.records if record.probe_id}
    fresh = tuple(record for record in kept.records if record.probe_id not in known)
    return replace(run, records=(*run.records, *fresh), tuners=kept.tuners)


def _of_result(path: Path) -> Run:
    """A recommendation under another name than its own."""
    found: Recommendation = read_result(path)
    run = Run(path.parent, found, (), name=path.name)
    said = f"{path.name} was named: only the {len(run.cited)} probes that it cites are shown."
    return replace(run, records=run.cited, faults=(said,))


def _of_records(path: Path) -> Run:
    reader = _Reader()
    records = reader.records(path)
    of = {f"{record.model.title} on {record.device.title}" for record in records}
    if len(of) > 1:
        raise UsageError(
            f"{path} holds records of {len(of)} models or devices ({', '.join(sorted(of)[:3])} …).",
            "A run is of one: name the folder that 'planner tune' wrote.",
        )
    run = Run(path.parent, None, records, name=path.name)
    return replace(run, faults=tuple(reader.faults))


def _is_result(path: Path) -> bool:
    """Whether a JSON file is a recommendation."""
    if path.name == TUNE_RESULT:
        return True
    try:
        data = parse_json(read_text(path, MAX_RESULT_BYTES), str(path))
    except UsageError:
        return False
    return isinstance(data, dict) and "num_probes" in data
