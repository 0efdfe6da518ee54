"""A search read from what it left: a folder, one file of it, or the storage of its study.

What cannot be read is told and does not keep the rest from being shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from planner.core.errors import PlannerError, UsageError
from planner.core.files import (
    DATA_FOLDER,
    DATA_PROBES,
    DATA_RESULT,
    FED_RUNS,
    MAX_RESULT_BYTES,
    STUDY,
    TUNE_PROBES,
    TUNE_RESULT,
    open_at_once,
    parse_json,
    read_text,
)
from planner.core.schema import MeasurementRecord, parse
from planner.core.schema.loading import LOADER_FORMAT, DataRecommendation, FedRecord, LoaderRecord
from planner.core.schema.result import Recommendation
from planner.trainers.emission import read_result
from search.loop.study.records import read_records
from search.report.run import LoaderRun, Run

FILES = (TUNE_RESULT, TUNE_PROBES, STUDY, DATA_RESULT, DATA_PROBES, FED_RUNS)
STORAGES = (".db", ".journal", ".log")
_SQLITE = "sqlite:///"
_SNIFFED = 1 << 20  # bytes of a file, which tell what its first line is

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
    if run.found or run.records or run.loaders or run.fed:
        return run
    why = "\n".join(run.faults)
    raise UsageError(why or f"{path} holds no search: no {TUNE_RESULT}, no probes.", _WAY_OUT)


_WAY_OUT = (
    "Name the --output of a 'planner tune' or a 'planner data', a file of records, or a MODEL."
)


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

    def records(self, path: Path, kind: Any) -> tuple[Any, ...]:
        """The records of a file up to its first fault."""
        try:
            file = read_records(path, kind)
        except PlannerError as error:
            self.faults.append(error.message)
            return ()
        if file.fault:
            self.faults.append(f"{file.fault}; what stands before it was read.")
        return file.records


def _of_folder(folder: Path, study_name: str | None) -> Run:
    reader = _Reader()
    found = reader.result(read_result, folder / TUNE_RESULT)
    records = reader.records(folder / TUNE_PROBES, MeasurementRecord)
    run = Run(folder, found, records)
    kept = folder / STUDY
    data = folder / DATA_FOLDER
    loaders = _loaders(data if (data / DATA_RESULT).is_file() else folder, reader)
    if loaders is None and found is not None and found.feeding is not None:
        loaders = LoaderRun(records=(found.feeding.evidence,))
    if kept.is_file() and (records or found or not loaders):
        run = _with_study(run, f"{_SQLITE}{kept}", study_name, reader)
    if not run.records and run.cited:
        reader.faults.append(
            f"{TUNE_PROBES} is not there: only the {len(run.cited)} probes that {TUNE_RESULT} "
            "cites are shown."
        )
        run = replace(run, records=run.cited)
    fed = reader.records(folder / FED_RUNS, FedRecord)
    return replace(run, faults=tuple(reader.faults), loaders=loaders, fed=fed)


def _loaders(folder: Path, reader: _Reader) -> LoaderRun | None:
    found = reader.result(_read_data, folder / DATA_RESULT)
    records = reader.records(folder / DATA_PROBES, LoaderRecord)
    if not records and found is not None:
        records = _cited(found)
    return LoaderRun(found, records) if found or records else None


def _cited(found: DataRecommendation) -> tuple[LoaderRecord, ...]:
    """The records that a recommendation itself holds."""
    return tuple(r for r in (found.evidence, *found.runners_up) if r is not None)


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
    loaders = run.loaders or (LoaderRun(records=kept.loaders) if kept.loaders else None)
    return replace(run, records=(*run.records, *fresh), tuners=kept.tuners, loaders=loaders)


def _of_result(path: Path) -> Run:
    """A recommendation under another name than its own."""
    if _kind_of_result(path) == "loader":
        data = _read_data(path)
        return Run(path.parent, None, (), loaders=LoaderRun(data, _cited(data)), name=path.name)
    found: Recommendation = read_result(path)
    run = Run(path.parent, found, (), name=path.name)
    said = f"{path.name} was named: only the {len(run.cited)} probes that it cites are shown."
    loaders = LoaderRun(records=(found.feeding.evidence,)) if found.feeding else None
    return replace(run, records=run.cited, faults=(said,), loaders=loaders)


def _of_records(path: Path) -> Run:
    """A file of records, of whichever kind its first line is."""
    reader, first = _Reader(), _first_line(path)
    run = Run(path.parent, None, (), name=path.name)
    if "loader_format" in first and "loader" in first:
        run = replace(run, fed=reader.records(path, FedRecord))
    elif "loader_format" in first:
        run = replace(run, loaders=LoaderRun(records=reader.records(path, LoaderRecord)))
    else:
        run = replace(run, records=reader.records(path, MeasurementRecord))
    if run.loaders is not None and not run.loaders.records:
        run = replace(run, loaders=None)
    return replace(run, faults=tuple(reader.faults))


def _first_line(path: Path) -> dict[str, Any]:
    """The fields of a file's first line; none where it is no JSON object."""
    try:
        with open(path, "rb", opener=open_at_once) as file:
            line = next((part for part in file.read(_SNIFFED).split(b"\n") if part.strip()), b"")
        data = json.loads(line)
    except (OSError, ValueError, RecursionError):  # reading the records says what is wrong
        return {}
    return data if isinstance(data, dict) else {}


def _read_data(path: Path) -> DataRecommendation:
    """What `planner data` recommends. Raises UsageError, as `read_result`."""
    data = parse_json(read_text(path, MAX_RESULT_BYTES), str(path))
    version = data.get("loader_format") if isinstance(data, dict) else None
    if version != LOADER_FORMAT:
        raise UsageError(
            f"{path} has result format {version!r}, and this planner reads {LOADER_FORMAT}."
        )
    return parse(DataRecommendation, data, str(path))


def _is_result(path: Path) -> bool:
    return path.name in (TUNE_RESULT, DATA_RESULT) or _kind_of_result(path) != ""


def _kind_of_result(path: Path) -> str:
    """ "step" or "loader" where a JSON file is a recommendation, else ""."""
    try:
        data = parse_json(read_text(path, MAX_RESULT_BYTES), str(path))
    except UsageError:
        return ""
    if not isinstance(data, dict) or "num_probes" not in data:
        return ""
    return "loader" if "loader_format" in data else "step"
