"""A search in TensorBoard: a scalar by probe, and each probe's setting in the HPARAMS tab."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.files import named_path
from planner.report.settings import ALWAYS_SAID
from planner.schema import MeasurementRecord
from planner.units import GIB
from planner.watching.scalars import summary_writer
from search.probe.evidence import is_feasible
from search.report.frame import Records, gathered

RATE, MEMORY, BEST = (
    "search/images_per_second",
    "search/memory_gib",
    "search/best_images_per_second",
)
PROBE_RATE, PROBE_MEMORY = "probe/images_per_second", "probe/memory_gib"


def write_tensorboard(records: Records, folder: str | PathLike[str]) -> Path:
    """Writes event files of a search into `folder`: images/s, memory and the best so far by probe,
    and a run for each probe that TensorBoard's HPARAMS tab compares.

    `records` are those of `records_frame`. Returns the folder. Raises as it does, and
    PlannerError where torch or tensorboard is missing or the folder cannot be written.
    """
    folder = named_path(folder, "folder")
    found = list(gathered(records))
    fields = _varying(found)
    try:
        writer = summary_writer(folder)
        best = 0.0
        for number, record in enumerate(found, start=1):
            scalars = _scalars(record)
            if record.images_per_second and is_feasible(record, record.allowed_bytes):
                best = max(best, record.images_per_second)
                scalars[BEST] = best
            for name, value in scalars.items():
                writer.add_scalar(name, value, number)
            shown = {PROBE_RATE: scalars.get(RATE), PROBE_MEMORY: scalars.get(MEMORY)}
            writer.add_hparams(
                {**{name: _shown(getattr(record.setting, name)) for name in fields},
                 "status": record.status},
                {name: value for name, value in shown.items() if value is not None},
                run_name=f"probe_{number:04}",
                global_step=number,
            )  # fmt: skip
        writer.close()
    except OSError as error:
        raise PlannerError(f"{folder} cannot be written: {error.strerror}.") from None
    return folder


def _scalars(record: MeasurementRecord) -> dict[str, float]:
    found = {RATE: record.images_per_second}
    used = record.used_bytes
    found[MEMORY] = used / GIB if used is not None else None
    return {name: value for name, value in found.items() if value is not None}


def _varying(records: Sequence[MeasurementRecord]) -> list[str]:
    """The fields of a setting that are always said, and those in which probes differ."""
    if not records:
        return []
    fields = type(records[0].setting).model_fields
    return [
        name
        for name in fields
        if name in ALWAYS_SAID or len({str(getattr(r.setting, name)) for r in records}) > 1
    ]


def _shown(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
