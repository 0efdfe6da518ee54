"""The data that a search was asked to feed: found anew, or as `planner data` found them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.core.errors import UsageError
from planner.core.files import DATA_RESULT, MAX_RESULT_BYTES, parse_json, read_text
from planner.core.schema import Model, parse
from planner.core.schema.loading import (
    LOADER_FORMAT,
    DataRecommendation,
    DataSource,
    recorded_processors,
)
from planner.machine.host import read_host
from planner.training.loading.sources import find_source
from search.loop.options import SearchOptions
from search.tuning.feeding.matching import check_match, check_size


@dataclass(frozen=True)
class AskedData:
    """The data, and the loader that is known for them; None where it is still to be found."""

    source: DataSource
    known: DataRecommendation | None = None

    @property
    def processors(self) -> float:
        """That a process could keep busy on the machine where the loader is, or was, measured."""
        return recorded_processors(self.known.host if self.known else {}) or read_host().cpus


def find_asked(options: SearchOptions, model: Model) -> AskedData | None:
    """The data of `options`, None where none were named. Raises UsageError or UnsupportedError
    where there are none, or `model` does not take them: before anything is probed."""
    if options.with_data is not None:
        known = read_data_result(options.with_data)
        check_match(model, known.data)
        assert known.setting is not None, "read_data_result has seen it"
        check_size(model, known.setting)
        return AskedData(known.data, known)
    if options.data is None:
        return None
    source = find_source(options.data)
    check_match(model, source)
    return AskedData(source)


def read_data_result(path: Path) -> DataRecommendation:
    """data.json of a folder, or that file. Raises UsageError where it is none, and where it
    recommends no loader."""
    file = path / DATA_RESULT if path.is_dir() else path
    data = parse_json(read_text(file, MAX_RESULT_BYTES), str(file))
    if isinstance(data, dict) and isinstance(data.get("loader_format"), int):
        written = data["loader_format"]
        if written > LOADER_FORMAT:
            raise UsageError(
                f"{file} is of format {written}, newer than this planner's {LOADER_FORMAT}.",
                "Update planner, or measure the data again with 'planner data'.",
            )
    found = parse(DataRecommendation, data, str(file))
    if found.setting is None or found.evidence is None or not found.evidence.images_per_second:
        raise UsageError(
            f"{file} recommends no loader: {found.advice or found.stopped_because}",
            "Mend what it says, and run 'planner data' again.",
        )
    return found
