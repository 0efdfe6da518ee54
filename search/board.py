"""A search as TensorBoard reads it: a scalar by probe, and a run of each probe for the HPARAMS tab.

Written by tensorboard's own classes and without torch: the process that searches does not load it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.files import unwritable
from planner.report.settings import ALWAYS_SAID
from planner.schema import MeasurementRecord, TrainSetting
from planner.units import GIB
from search.probe.evidence import is_feasible
from search.space import Space

RATE, MEMORY, BEST = (
    "search/images_per_second",
    "search/memory_gib",
    "search/best_images_per_second",
)
PROBE_RATE, PROBE_MEMORY = "probe/images_per_second", "probe/memory_gib"


class EventFile:
    """A file of events in a folder, in place of those that an earlier run left there. Each is on
    its way to the disk when `add` returns: TensorBoard reads on meanwhile. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._hparams = hparams_pb  # a tensorboard without it is told of before any probe
        folder.mkdir(parents=True, exist_ok=True)
        # As TensorBoard looks for them: several in a folder are one run, in the order of names.
        name = f"{time.time():.6f}.{platform.node()}.{os.getpid()}"
        self._file = (folder / f"events.out.tfevents.{name}").open("xb", buffering=0)
        self._records = RecordWriter(self._file)
        self._add(time.time(), file_version="brain.Event:2")
        begun = SessionLog(status=SessionLog.START)  # what has this step or a later one is void
        self._add(time.time(), session_log=begun, step=1)

    def add_scalars(self, values: Mapping[str, float | None], step: int, seconds: float) -> None:
        """The known of these values, at a step and at `seconds` since 1970."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        known = {name: value for name, value in values.items() if value is not None}
        listed = [Summary.Value(tag=name, simple_value=value) for name, value in known.items()]
        self._add(seconds, summary=Summary(value=listed), step=step)

    def add_setting(self, said: Mapping[str, bool | int | float | str], seconds: float) -> None:
        """What the HPARAMS tab shows of this folder's run."""
        self._add(seconds, summary=self._hparams(dict(said), trial_id=""))

    def close(self) -> None:
        self._file.close()

    def _add(self, seconds: float, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=seconds, **fields).SerializeToString())


class Board:
    """The event files of one search in `folder`. Of a setting they show the fields that are always
    said, and those in which `settings` differ.

    Raises PlannerError where tensorboard is missing or nothing can be written there. What fails
    later ends no search: `say` is told, once, and no more is written.
    """

    def __init__(
        self, folder: Path, settings: Sequence[TrainSetting],
        say: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.fields = folder, _varying(settings)
        self._say, self._is_open = say, True
        self._best, self._number = 0.0, 0
        try:
            self._events = EventFile(folder)
        except ImportError:
            raise PlannerError(
                "TensorBoard's files need tensorboard, which is not installed.",
                "Install it with: pip install 'planner[tensorboard]'",
            ) from None
        except OSError as error:
            raise self._not_written(error) from None

    def add(self, record: MeasurementRecord) -> None:
        """The next probe that has ended."""
        if not self._is_open:
            return
        self._number += 1
        try:
            self._add(record)
        except OSError as error:
            self._is_open = False
            failed = self._not_written(error)
            if self._say is None:
                raise failed from None
            self._say(f"{failed.message} TensorBoard gets no more of this search.")

    def close(self) -> None:
        self._events.close()

    def _add(self, record: MeasurementRecord) -> None:
        number, ended = self._number, _seconds(record.date)
        rate, used = record.images_per_second, record.used_bytes
        memory = used / GIB if used is not None else None
        best = None
        if rate and is_feasible(record, record.allowed_bytes):
            best = self._best = max(self._best, rate)
        self._events.add_scalars({RATE: rate, MEMORY: memory, BEST: best}, number, ended)
        said = {name: _shown(getattr(record.setting, name)) for name in self.fields}
        run = EventFile(self.folder / f"probe_{number:04}")
        try:
            run.add_setting({**said, "status": record.status}, ended)
            run.add_scalars({PROBE_RATE: rate, PROBE_MEMORY: memory}, number, ended)
        finally:
            run.close()

    def _not_written(self, error: OSError) -> PlannerError:
        return unwritable(self.folder, error, "name another folder for TensorBoard")


@contextmanager
def told_to_board(
    folder: Path | None, space: Space[TrainSetting], say: Callable[[str], None]
) -> Iterator[Callable[[MeasurementRecord], None]]:
    """What is to be told of each probe as it ends; nobody, where no folder was named."""
    if folder is None:
        yield lambda record: None
        return
    with closing(Board(folder, [c.setting for c in space.candidates], say)) as board:
        yield board.add


def _varying(settings: Sequence[TrainSetting]) -> list[str]:
    return [
        name
        for name in TrainSetting.model_fields
        if name in ALWAYS_SAID or len({str(getattr(s, name)) for s in settings}) > 1
    ]


def _seconds(date: str) -> float:
    """Since 1970; now, where a record that somebody else wrote says no such date."""
    try:
        return datetime.fromisoformat(date).timestamp()
    except (ValueError, OverflowError):
        return time.time()


def _shown(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
