"""A search that ended or still runs, read from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.errors import UsageError
from planner.schema import MeasurementRecord
from planner.schema.result import Recommendation
from planner.trainers.emission import read_result
from search.study.records import read_records

RESULT, PROBES = "recommendation.json", "probes.jsonl"


@dataclass(frozen=True)
class Run:
    """A folder of `planner tune`: what was recommended (None while it runs), and every probe in the
    order they ended. `faults` say what of it could not be read."""

    folder: Path
    found: Recommendation | None
    records: tuple[MeasurementRecord, ...]
    faults: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return str(self.folder)


def is_run(target: str) -> bool:
    """Whether a target of `planner report` is the folder of a run, or a file of one."""
    path = Path(target)
    if path.name in (RESULT, PROBES):
        return path.is_file()
    return any((path / name).is_file() for name in (RESULT, PROBES))


def read_run(target: str | Path) -> Run:
    """The run in a folder, or beside one of its files. Raises UsageError where it holds nothing."""
    path = Path(target)
    folder = path if path.is_dir() else path.parent
    result, probes = folder / RESULT, folder / PROBES
    found = read_result(result) if result.is_file() else None
    file = read_records(probes)
    if found is None and not file.records:
        raise UsageError(
            f"{folder} holds neither {RESULT} nor probes in {PROBES}.",
            "Name the --output of a 'planner tune', or a MODEL.",
        )
    return Run(folder, found, file.records, (file.fault,) if file.fault else ())
