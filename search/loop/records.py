"""What a search leaves on disk: a folder with its recommendation and its records, a JSON line each,
appended and never rewritten; and locks, since two tuners of one folder or GPU disturb each other.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from planner.core.errors import PlannerError, UsageError, shorten
from planner.core.files import way_to_write, write_whole
from planner.core.schema.record import RECORD_FORMAT, MeasurementRecord, Recommendation


@dataclass(frozen=True)
class RecordFile:
    """The records of a file up to its first fault; `fault` says what is wrong and where, "" where
    nothing is wrong."""

    records: tuple[MeasurementRecord, ...]
    fault: str = ""


class RecordsNotWrittenError(PlannerError):
    """A record cannot be written: the disk is full, or the file cannot be opened."""


def read_records(path: Path | str) -> RecordFile:
    """The records of `path` in order, up to the first line that is none. A missing file has none. A
    last line without a newline is a torn write: it counts if it is whole, else it is a fault.
    Raises PlannerError where the file cannot be read."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            lines = _read_all(file.fileno()).split(b"\n")
    except FileNotFoundError:
        return RecordFile(())
    except OSError as error:
        law = f"{path} cannot be read: {error.strerror}."
        raise PlannerError(law, "Allow reading it, or name another --output.") from error
    records: list[MeasurementRecord] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
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
    """A JSON line with its newline, without the fields that are None, which reads back equal."""
    return record.model_dump_json(exclude_none=True).encode() + b"\n"


def append_records(
    path: Path | str, records: Sequence[MeasurementRecord], option: str = "--output"
) -> int:
    """Appends the `records` whose `probe_id` is not in the file, and returns how many they were;
    they are on disk then.

    The file is locked meanwhile, since several processes may append to it. A torn last line, of a
    writer that was killed, holds no record and is cut off first. Raises RecordsNotWrittenError,
    which names the `option` that gave `path`; the file is then as long as it was before.
    """
    path = Path(path)
    try:
        with _locked(path) as descriptor:
            probe_ids = _mend(descriptor)
            fresh = [r for r in records if not r.probe_id or r.probe_id not in probe_ids]
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
    """Makes the file end with a whole line, and returns the probe ids that it holds."""
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
            continue  # read_records reports it; here it only has no id


def _read_all(descriptor: int) -> bytes:
    """The bytes of a file, as many as its size says: a device may have no end."""
    size = os.fstat(descriptor).st_size
    chunks, offset = [], 0
    while offset < size and (chunk := os.pread(descriptor, size - offset, offset)):
        chunks.append(chunk)
        offset += len(chunk)
    return b"".join(chunks)


def _append(descriptor: int, data: bytes) -> None:
    """Writes all of `data` or nothing: a partial write, on a full disk, is taken back."""
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
    """Within, holds the lock of a folder of results. Raises UsageError where another has it."""
    with _lock(folder) as is_ours:
        if not is_ours:
            raise UsageError(
                f"another tuner is at {folder}.",
                "Choose another --output; tuners that share a study have one --storage.",
            )
        yield


def hold_gpu(uuid: str) -> AbstractContextManager[bool]:
    """Within, holds the lock of a GPU; False where another tuner has it. All users of the machine
    share its file, which is opened for reading only, and only made where there is none."""
    name = re.sub(r"[^A-Za-z0-9-]+", "_", uuid)[:80]  # the driver's text may be no file name
    path = Path(tempfile.gettempdir()) / f"planner-{name}.lock"
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o644))
    return _lock(path)


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Within, holds a lock: False where another process has it, True also where locks do not work.
    The kernel releases it when its holder ends for any reason."""
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
            pass  # a file system without locks, or another user's file
        yield is_ours


def make_folder(path: Path) -> Path:
    """Makes the folder for results, unless there is one. Raises UsageError."""
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
    """The file of a `recommendation` cannot be written."""

    def __init__(self, message: str, way_out: str, recommendation: Recommendation) -> None:
        super().__init__(message, way_out)
        self.recommendation = recommendation


def write_result(path: Path, recommendation: Recommendation, probes: Path | None = None) -> None:
    """Writes a recommendation, made of the probes in the file `probes`. Raises
    ResultNotWrittenError."""
    free = f"The probes are in {probes}: free" if probes else "Free"
    try:
        write_whole(path, recommendation.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ResultNotWrittenError(
            f"{path} cannot be written: {error.strerror}.",
            f"{free} space and run the same command, or choose another --output.",
            recommendation,
        ) from error
