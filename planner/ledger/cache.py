"""Recorded ledgers on disk, a file each: any number of processes may read and write at once.

A file is a line with the format and a checksum, a line of JSON that says whose ledger it is, and
the ledger, packed; what a library says of a model's name is kept in the same way. What is torn,
foreign or of an older format is as good as absent. Files are written whole; of two that record the
same step the last one stays. Nothing in a file is run. What a recorded step depends on, its key, is
found without importing any of it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import planner
from planner.core.errors import ContractError, PlannerError, UnsupportedError, UsageError
from planner.core.files import cache_directory, write_whole
from planner.core.schema import FactoryModel, Model, TrainSetting
from planner.core.units import MIB
from planner.ledger.ledger import (
    WORKSPACE_VARIABLE,
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
# Of a ledger, what is kept beside its events.
_FIELDS = (
    "batch_size", "num_parameters", "notes", "doubtful_bytes", "late_bytes", "unit",
    "own_optimizer", "is_recorded",
)  # fmt: skip
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
        _warn_once(f"Recordings cannot be kept in {path.parent}: {error.strerror or error}.")


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
    kept = {name: getattr(ledger, name) for name in _FIELDS}
    return {"rows": list(rows), "events": numbers, "storages": storages, **kept}


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
    kept = {name: body[name] for name in _FIELDS}
    return Ledger(tuple(events), **{**kept, "notes": tuple(body["notes"])})


def _error(kind: str, message: str, way_out: str) -> PlannerError:
    error: PlannerError = {c.__name__: c for c in _ERRORS}[kind](message, way_out)
    return error


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


@cache
def _warn_once(text: str) -> None:
    print(text, file=sys.stderr)


# What a recorded step depends on: the key that it is kept under.

Key = dict[str, Any]
OURS = frozenset(("planner", "search"))
# The rooms whose code decides what a recorded ledger holds.
MAKERS = ("core/schema", "ledger", "libraries", "memory", "step", "recording", "training")


def ledger_key(model: Model, setting: TrainSetting, batch: int) -> Key | None:
    """All that decides the ledger: the model, what of its source lies outside installed packages,
    the setting without its batch, and versions. None where a factory's source cannot be found."""
    packages = {"torch", getattr(model, "library", "")}
    if setting.needs_torchao:
        packages.add("torchao")
    sources: dict[str, str] = {}
    if isinstance(model, FactoryModel):
        if _source_of(model.parts[0]) is None:
            return None
        found = _read_sources(model.parts[0])
        sources = found.digests
        packages |= found.packages
    return {
        "title": model.title,
        "model": {"kind": type(model).__name__, **model.model_dump(mode="json")},
        "setting": setting.model_dump(mode="json", exclude={"batch_size"}),
        "batch": batch,
        "sources": sources,
        "workspace": os.environ.get(WORKSPACE_VARIABLE, ""),
        "versions": _versions(packages - OURS),
    }


def name_key(fields: Key) -> Key:
    """Of what a library says of a model's name; `fields` tell which."""
    library = fields["library"]
    return {
        "title": f"{library}:{fields['name']}",
        "name": fields,
        "versions": _versions({library, "torch"}),
    }


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those installed, of Python and of planner."""
    return {
        "planner": f"{planner.__version__} ({own_digest()})",
        "python": ".".join(map(str, sys.version_info[:2])),
        **{name: found for name in sorted(packages) if (found := _version(name))},
    }


class _Sources(NamedTuple):
    """The digest of each file of the user's that importing a module reads, by its module's name;
    the installed packages that these files import; and the files, with when they were changed."""

    digests: dict[str, str]
    packages: set[str]
    files: dict[str, tuple[Path, int]]


@cache
def _read_sources(module: str) -> _Sources:
    digests: dict[str, str] = {}
    files: dict[str, tuple[Path, int]] = {}
    packages, seen = set(OURS), set[str]()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in seen or top in packages or top in sys.stdlib_module_names:
            continue
        seen.add(name)
        file = _source_of(name)
        if file is None:  # a name in a module, or what has no Python source
            continue
        if _is_installed(file):
            packages.add(top)
            continue
        files[name] = (file, _changed_ns(file))
        data = file.read_bytes()
        digests[name] = hashlib.sha256(data).hexdigest()[:16]
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        above = name.rpartition(".")[0]
        waiting += [*_imported(data, package), *([above] if above else [])]
    return _Sources(digests, packages, files)


def have_changed(module: str) -> bool:
    """Whether a module's files are others than those of its keys so far; if so, the next key is of
    them. Of a module without a file nobody can tell."""
    files = _read_sources(module).files
    first, _ = files.get(module, (None, 0))
    same = first == _source_of(module) and all(_changed_ns(f) == at for f, at in files.values())
    if first is None or not same:
        _read_sources.cache_clear()
        return True
    return False


def _changed_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _source_of(module: str) -> Path | None:
    """The Python file of a module, which is not imported for it."""
    first, *rest = module.split(".")
    for base in _folders(first):
        place = base.joinpath(first, *rest)
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                return file
    return None


def _folders(package: str) -> Iterator[Path]:
    """Where a package may lie: the current folder, Python's path, and where an editable install
    says that it is."""
    yield from (Path.cwd(), *map(Path, sys.path))
    with suppress(ValueError):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]


def _is_installed(file: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def _imported(source: bytes, package: str) -> Iterator[str]:
    """The names that a file of `package` imports: modules, and what may be a module in one."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def _version(package: str) -> str:
    try:
        return version(package) if package else ""
    except PackageNotFoundError:
        return ""


@cache
def own_digest(rooms: tuple[str, ...] = MAKERS) -> str:
    """Of the source that makes ledgers, or of other rooms (from where `planner` lies, "." for all
    of it): while it is worked on its version says too little."""
    digest = hashlib.sha256()
    for room in rooms:
        for file in sorted((Path(planner.__file__).parent / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
