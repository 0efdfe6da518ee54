"""Recorded ledgers on disk, a file each: any number of processes may read and write at once.

A file is a line with the format and a checksum, a line of JSON that says whose ledger it is, and
the ledger, packed; what a library says of a model's name is kept in the same way. What is torn,
foreign or of an older format is as good as absent. Files are written whole; of two that record the
same step the last one stays. Nothing in a file is run.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.core.errors import ContractError, PlannerError, UnsupportedError, UsageError
from planner.core.files import cache_directory, write_whole
from planner.core.units import MIB
from planner.ledger.key import Key
from planner.ledger.ledger import (
    Allocated,
    Awaited,
    Computed,
    Emptied,
    Event,
    Freed,
    Ledger,
    Marked,
    Scratch,
    Sent,
    Tagged,
)

FORMAT = b"planner ledger 4"
SUFFIX = ".ledger"
MAX_CACHE_BYTES = 256 * MIB  # of all files; a ledger takes 5 to 50 KB
_MAX_FILE_BYTES = 16 * MIB
_MAX_LEDGER_BYTES = 256 * MIB  # unpacked
_STALE_SECONDS = 3600  # after which what a killed writer left beside is no longer being written
_KINDS = {
    kind.__name__: kind
    for kind in (Allocated, Scratch, Freed, Emptied, Tagged, Marked, Computed, Sent, Awaited)
}
_OF_A_STORAGE = frozenset(kind for kind in _KINDS.values() if kind._fields[0] == "storage")
_ERRORS = (PlannerError, ContractError, UnsupportedError, UsageError)


# A PlannerError is how a recording ended; a plain dict is what a library says of a model's name.
Kept = Ledger | PlannerError | dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A file of the cache. Times are seconds since the epoch."""

    path: Path
    key: Key
    num_bytes: int
    used: float


def folder() -> Path:
    """PLANNER_CACHE_DIR's or the platform's folder for what can be made again."""
    return cache_directory() / "ledgers"


def load(key: Key) -> Kept | None:
    """What is kept under `key`, marked as used; None where there is nothing, or nothing whole."""
    path = _path(key)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES)
    except OSError:
        return None
    found = decode(data, key)
    if found is not None:
        with suppress(OSError):
            os.utime(path)
    return found


def store(key: Key, kept: Kept) -> None:
    """Keeps a ledger, and drops those that were not used for longest where all are more than
    `MAX_CACHE_BYTES`. What cannot be written costs only the next recording: that is said once."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, encode(key, kept))
        _evict(path.parent)
    except OSError as error:
        _say_once(f"Recordings cannot be kept in {path.parent}: {error.strerror or error}.")


def entries() -> list[Entry]:
    """All files of the cache that are in this format, the last used first."""
    found = []
    for path in folder().glob(f"*{SUFFIX}"):
        with suppress(OSError, ValueError, KeyError), path.open("rb") as file:
            if file.readline(1024).startswith(FORMAT + b" "):
                key = json.loads(file.readline(MIB))
                stat = path.stat()
                found.append(Entry(path, key, stat.st_size, stat.st_mtime))
    return sorted(found, key=lambda entry: -entry.used)


def clear() -> int:
    """Removes all files of the cache, of any format; how many there were. Raises OSError."""
    paths = list(folder().glob(f"*{SUFFIX}"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def encode(key: Key, kept: Kept) -> bytes:
    """The content of a file."""
    body: dict[str, Any]
    if isinstance(kept, PlannerError):
        kind = next(c for c in type(kept).__mro__ if c in _ERRORS)
        body = {"error": [kind.__name__, kept.message, kept.way_out]}
    else:
        body = {"found": kept} if isinstance(kept, dict) else _pack(kept)
    packed = zlib.compress(json.dumps(body, separators=(",", ":")).encode())
    rest = json.dumps(key).encode() + b"\n" + packed
    return b"%s %s\n%s" % (FORMAT, hashlib.sha256(rest).hexdigest().encode(), rest)


def decode(data: bytes, key: Key) -> Kept | None:
    """What a file says of `key`; None for one that is not whole, or of another key or format."""
    head, _, rest = data.partition(b"\n")
    if head != b"%s %s" % (FORMAT, hashlib.sha256(rest).hexdigest().encode()):
        return None
    about, _, packed = rest.partition(b"\n")
    try:
        if json.loads(about) != key:
            return None
        body = json.loads(zlib.decompressobj().decompress(packed, _MAX_LEDGER_BYTES))
        if "error" in body:
            return _error(*body["error"])
        return dict(body["found"]) if "found" in body else _unpack(body)
    except (ValueError, KeyError, IndexError, TypeError, StopIteration, zlib.error):
        return None


def _pack(ledger: Ledger) -> dict[str, Any]:
    """Events as rows of a table, each once, and their storages beside it."""
    rows: dict[tuple[Any, ...], int] = {}
    numbers, storages, last = [], [], 0
    for event in ledger.events:
        fields: tuple[Any, ...] = tuple(event)
        if event._fields[0] == "storage":
            storages.append(fields[0] - last)
            last, fields = fields[0], fields[1:]
        row = (type(event).__name__, *fields)
        numbers.append(rows.setdefault(row, len(rows)))
    return {
        "rows": list(rows),
        "events": numbers,
        "storages": storages,
        "batch_size": ledger.batch_size,
        "num_parameters": ledger.num_parameters,
        "notes": ledger.notes,
        "doubtful_bytes": ledger.doubtful_bytes,
        "late_bytes": ledger.late_bytes,
        "unit": ledger.unit,
        "own_optimizer": ledger.own_optimizer,
        "is_recorded": ledger.is_recorded,
    }


def _unpack(body: dict[str, Any]) -> Ledger:
    rows = []
    for name, *fields in body["rows"]:
        fields = [tuple(field) if isinstance(field, list) else field for field in fields]
        rows.append((_KINDS[name], fields))
    events: list[Event] = []
    steps = iter(body["storages"])
    storage = 0
    for number in body["events"]:
        kind, fields = rows[number]
        if kind in _OF_A_STORAGE:
            storage += next(steps)
            events.append(kind(storage, *fields))
        else:
            events.append(kind(*fields))
    return Ledger(
        tuple(events),
        body["batch_size"],
        body["num_parameters"],
        tuple(body["notes"]),
        doubtful_bytes=body["doubtful_bytes"],
        late_bytes=body["late_bytes"],
        unit=body["unit"],
        own_optimizer=body["own_optimizer"],
        is_recorded=body["is_recorded"],
    )


def _error(kind: str, message: str, way_out: str) -> PlannerError:
    found: PlannerError = {c.__name__: c for c in _ERRORS}[kind](message, way_out)
    return found


def _path(key: Key) -> Path:
    text = json.dumps(key, sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}{SUFFIX}"


def _evict(where: Path) -> None:
    """Removes what was used longest ago, beyond the bound, and what killed writers left."""
    files = sorted(_files(where), key=lambda found: found[0], reverse=True)
    total = 0
    for used, num_bytes, path in files:
        total += num_bytes
        stale = path.suffix != SUFFIX and used < time.time() - _STALE_SECONDS
        if stale or total > MAX_CACHE_BYTES:
            path.unlink(missing_ok=True)


def _files(where: Path) -> Iterator[tuple[float, int, Path]]:
    for path in where.iterdir():
        if path.suffix in (SUFFIX, ".tmp"):
            with suppress(FileNotFoundError):
                stat = path.stat()
                yield stat.st_mtime, stat.st_size, path


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr)
