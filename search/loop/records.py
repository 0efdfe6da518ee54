"""What a search leaves on disk: a folder with its recommendation and its records, one JSON line
each, appended and never rewritten; and who is at it or at a GPU, as two are in each other's way.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from planner.core.errors import PlannerError, UsageError, shorten
from planner.core.files import way_to_write, write_whole
from planner.core.schema.record import RECORD_FORMAT, MeasurementRecord

# How older planners began what measures no setting: it is passed over.
OBSERVATION = b'{"observation":'


@dataclass(frozen=True)
class RecordFile:
    """The records of a file up to its first fault; `fault` says what is wrong and where, "" if
    nothing is."""

    records: tuple[MeasurementRecord, ...]
    fault: str = ""


class RecordsNotWrittenError(PlannerError):
    """A record could not be put on disk (a full disk, a file that cannot be written)."""


def read_records(path: Path | str) -> RecordFile:
    """All records of `path` in order, up to the first line that is not one.

    A missing file has none. A last line without its newline is a torn write: it counts when it is
    whole, and is a fault when it is not. Raises PlannerError where the file cannot be read.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            lines = _read_all(file.fileno()).split(b"\n")
    except FileNotFoundError:
        return RecordFile(())
    except OSError as error:
        raise PlannerError(f"{path} cannot be read: {error.strerror}.") from error
    records: list[MeasurementRecord] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith(OBSERVATION):
            continue
        try:
            records.append(parse_record(line))
        except ValueError as error:
            torn = number == len(lines)
            how = "is torn (its writer was stopped)" if torn else f"is not a record: {error}"
            return RecordFile(tuple(records), f"{path}: line {number} {how}")
    return RecordFile(tuple(records))


def parse_record(line: bytes | str) -> MeasurementRecord:
    """One JSON line as a record. Raises ValueError with a one-line reason."""
    try:
        record = MeasurementRecord.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}" if place else str(first["msg"])) from None
    if record.format > RECORD_FORMAT:
        raise ValueError(f"format {record.format} is newer than this planner's {RECORD_FORMAT}")
    return record


def format_record(record: MeasurementRecord) -> bytes:
    """One JSON line with its newline; what is unset or default is left out, as it reads back."""
    return record.model_dump_json(exclude_none=True).encode() + b"\n"


def append_records(
    path: Path | str, records: Sequence[MeasurementRecord], option: str = "--output"
) -> int:
    """Appends those of `records` whose `probe_id` is not in the file; on disk when this returns.

    Several processes may append to one file: it is locked meanwhile. A torn last line (a writer
    that was killed) is cut off first: it holds no record. Returns how many were new.
    Raises RecordsNotWrittenError, with the file as long as it was before, when the disk is full;
    it names the `option` that `path` was given with.
    """
    path = Path(path)
    try:
        with _locked(path) as descriptor:
            known = _mend(descriptor)
            fresh = [r for r in records if not r.probe_id or r.probe_id not in known]
            if fresh:
                _append(descriptor, b"".join(format_record(r) for r in fresh))
    except OSError as error:
        raise RecordsNotWrittenError(
            f"{path} cannot be written: {error.strerror}.",
            way_to_write(error, f"choose another {option}"),
        ) from error
    return len(fresh)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    import fcntl  # Linux: records are read anywhere

    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK  # not for a pipe
    descriptor = os.open(path, flags, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)  # releases the lock


def _mend(descriptor: int) -> set[str]:
    """Ends the file on a whole line; the probe ids that it holds."""
    data = _read_all(descriptor)
    body, newline, tail = data.rpartition(b"\n")
    if tail.strip():
        if next(_whole_records(tail), None) is None:
            os.ftruncate(descriptor, len(body) + len(newline))
        else:
            _append(descriptor, b"\n")
    return {record.probe_id for record in _whole_records(data)}


def _whole_records(data: bytes) -> Iterator[MeasurementRecord]:
    for line in data.split(b"\n"):
        try:
            yield parse_record(line)
        except ValueError:
            continue  # read_records reports it; here it only has no id to offer


def _read_all(descriptor: int) -> bytes:
    """The file's bytes, and no more than its size says: a device may have no end."""
    size = os.fstat(descriptor).st_size
    chunks, at = [], 0
    while at < size and (chunk := os.pread(descriptor, size - at, at)):
        chunks.append(chunk)
        at += len(chunk)
    return b"".join(chunks)


def _append(descriptor: int, data: bytes) -> None:
    """All of `data` or none of it: a partial write (a full disk) is taken back."""
    before = os.fstat(descriptor).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except OSError:
        if os.fstat(descriptor).st_size > before:
            os.ftruncate(descriptor, before)
        raise


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Takes the lock of a folder of results while the context lasts. Raises UsageError where
    another tuner is at it."""
    with _lock(folder) as is_ours:
        if not is_ours:
            raise UsageError(
                f"another tuner is at {folder}.",
                "Choose another --output; tuners that share a study have one --storage.",
            )
        yield


def hold_gpu(uuid: str) -> AbstractContextManager[bool]:
    """Takes the lock of a GPU while the context lasts: one file for all users of the machine, so
    opened for reading only, and not made where it is. False where another tuner has it."""
    name = re.sub(r"[^A-Za-z0-9-]+", "_", uuid)[:80]  # a UUID is a driver's word, and no path
    path = Path(tempfile.gettempdir()) / f"planner-{name}.lock"
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o644))
    return _lock(path)


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """False where another has it, true also where nobody can tell. The kernel gives the lock back
    when its holder ends, however that comes."""
    import fcntl  # Linux: records are read anywhere

    with contextlib.ExitStack() as stack:
        is_ours = True
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_ours = False
        except OSError:
            pass  # a file system without locks, or a file that is another's
        yield is_ours


def make_folder(path: Path) -> Path:
    """The folder for results, made where it is not there. Raises UsageError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a path that holds a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"--output {shorten(str(path))} cannot be made a folder: {reason}.",
            "Choose another --output.",
        ) from None
    return path


class ResultNotWrittenError(PlannerError):
    """`recommendation` was found, and its file cannot be written."""

    def __init__(self, message: str, way_out: str, recommendation: BaseModel) -> None:
        super().__init__(message, way_out)
        self.recommendation: Any = recommendation


def write_result(path: Path, recommendation: BaseModel, probes: Path | None = None) -> None:
    """Raises ResultNotWrittenError; `probes` is where what it is made of is kept."""
    free = f"The probes are in {probes}: free" if probes else "Free"
    try:
        write_whole(path, recommendation.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ResultNotWrittenError(
            f"{path} cannot be written: {error.strerror}.",
            f"{free} space and run the same command, or choose another --output.",
            recommendation,
        ) from error
