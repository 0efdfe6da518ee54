"""Records of probes as a pandas frame: a row for each probe, typed columns with units in names."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from statistics import median
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from planner.core.errors import PlannerError, UsageError
from planner.core.files import TUNE_PROBES, named_path
from planner.core.schema import MeasurementRecord, TrainSetting
from search.loop.study.records import read_records

if TYPE_CHECKING:
    import pandas

Records = str | PathLike[str] | MeasurementRecord | Iterable["Records"]

TEXT, CATEGORY, COUNT, FIGURE, TRUTH = "string", "category", "Int64", "Float64", "boolean"
# Before the setting's own fields, and after them. Bytes are whole numbers, times are seconds.
OF_PROBE: Mapping[str, str] = {
    "probe_id": TEXT,
    "date": "datetime64[us, UTC]",
    "model": CATEGORY,
    "status": CATEGORY,
    "message": TEXT,
    "ended_in": CATEGORY,
    "images_per_second": FIGURE,
    "world_images_per_second": FIGURE,
    "step_seconds": FIGURE,
    "num_steps": COUNT,
    "used_bytes": COUNT,
    "peak_allocated_bytes": COUNT,
    "peak_reserved_bytes": COUNT,
    "device_bytes": COUNT,
    "allowed_bytes": COUNT,
    "free_bytes": COUNT,
    "taken_bytes": COUNT,
    "compile_seconds": FIGURE,
    "probe_seconds": FIGURE,
    "expected_images_per_second": FIGURE,
    "expected_used_bytes": FIGURE,
    "expected_fits": FIGURE,
    "flags": TEXT,
}
OF_DEVICE: Mapping[str, str] = {
    "device_kind": CATEGORY,
    "device_name": CATEGORY,
    "device_total_bytes": COUNT,
    "device_memory_cap_bytes": COUNT,
    "device_capability": CATEGORY,
    "device_driver": CATEGORY,
    "device_uuid": CATEGORY,
}


def records_frame(records: Records) -> pandas.DataFrame:
    """Probes as a pandas frame, in their order: of files of records, of folders of `planner tune`,
    of `MeasurementRecord`s, or of several of these.

    `step_seconds` is the median of a probe's steps, and an expected figure the middle of what the
    search believed when it chose the probe. A setting's fields are columns of their own names;
    `device_…` and `version_…` say where a probe ran. What is unknown is NA. A file counts
    up to its first fault, which is a warning. Raises PlannerError where pandas is missing or a file
    cannot be read, UsageError where there is none.
    """
    try:
        import pandas
    except ImportError:
        raise PlannerError(
            "a frame needs pandas, which is not installed.", "Install it with: pip install pandas"
        ) from None
    found = list(gathered(records))
    rows = [_row(record) for record in found]
    versions = sorted({name for record in found for name in record.versions})
    kinds = {**OF_PROBE, **_of_setting(), **OF_DEVICE}
    kinds |= {f"version_{name}": CATEGORY for name in versions}
    columns = {
        name: pandas.Series([row.get(name) for row in rows], dtype=kind)
        if kind != OF_PROBE["date"]
        else pandas.Series(
            pandas.to_datetime([row["date"] for row in rows], utc=True, format="ISO8601")
        ).astype(kind)
        for name, kind in kinds.items()
    }
    return pandas.DataFrame(columns)


def gathered(records: Records) -> Iterator[MeasurementRecord]:
    """The records meant, in order. A file counts up to its first fault, which is a warning. Raises
    UsageError where there is no such file."""
    if isinstance(records, MeasurementRecord):
        yield records
    elif isinstance(records, str | PathLike):
        path = named_path(records, "records")
        path = path / TUNE_PROBES if path.is_dir() else path
        if not path.exists():
            raise UsageError(
                f"{path} does not exist.",
                "Name a file of records, or the --output of 'planner tune'.",
            )
        file = read_records(path)
        if file.fault:
            warnings.warn(f"{file.fault}: read up to there.", stacklevel=3)
        yield from file.records
    else:
        for each in records:
            yield from gathered(each)


def _row(record: MeasurementRecord) -> dict[str, Any]:
    """A record by the names of columns."""
    same = {name: getattr(record, name) for name in OF_PROBE if hasattr(record, name)}
    expected = record.expected
    rate = expected.images_per_second if expected else None
    num_bytes = expected.used_bytes if expected else None
    device = {f"device_{name}": value for name, value in record.device.model_dump().items()}
    capability = record.device.capability
    setting = record.setting.model_dump()
    return {
        **same,
        "model": record.model.title,
        "ended_in": record.phase or None,
        "step_seconds": median(record.step_seconds) if record.step_seconds else None,
        "num_steps": len(record.step_seconds),
        "expected_images_per_second": rate[1] if rate else None,
        "expected_used_bytes": num_bytes[1] if num_bytes else None,
        "expected_fits": expected.fits if expected else None,
        "flags": "; ".join(record.flags),
        **{name: _plain(value) for name, value in setting.items()},
        **device,
        "device_capability": ".".join(map(str, capability)) if capability else None,
        **{f"version_{name}": version for name, version in record.versions.items()},
    }


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str | NoneType) else str(value)


def _of_setting() -> dict[str, str]:
    """The kind of column of each field of a setting, by what the field may hold."""
    return {name: _kind(f.annotation) for name, f in TrainSetting.model_fields.items()}


def _kind(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kind(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return _kind(next(each for each in get_args(annotation) if each is not NoneType))
    if origin is Literal or annotation not in (bool, int, float):
        return CATEGORY
    return {bool: TRUTH, int: COUNT, float: FIGURE}[annotation]
