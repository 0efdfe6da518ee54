"""Recorded ledgers on disk, a file each: any number of processes may read and write at once.

A file is a line with the format and a checksum, a line of JSON with the key, and the packed ledger;
the answers of a library about a model's name are cached in the same way. A torn or foreign file, or
one of an older format, counts as absent. Files are written whole; of two processes that record the
same step the last one wins. Nothing in a file is run. First the files, then the keys: all that a
recorded step depends on, found without importing any of it.
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
from pathlib import Path
from typing import Any, NamedTuple

import planner
from planner.core.errors import ContractError, PlannerError, UnsupportedError, UsageError
from planner.core.files import cache_directory, write_whole
from planner.core.schema import FactoryModel, Model, TrainSetting
from planner.core.torch_version import installed_version
from planner.core.units import MIB
from planner.ledger.ledger import EVENT_KINDS, WORKSPACE_VARIABLE, Event, Ledger

FORMAT = b"planner ledger 4"
SUFFIX = ".ledger"
MAX_CACHE_BYTES = 256 * MIB  # of all files; a ledger takes 5 to 50 KB
_MAX_FILE_BYTES = 16 * MIB
_MAX_LEDGER_BYTES = 256 * MIB  # unpacked
_STALE_SECONDS = 3600  # after which an unfinished file is what a killed writer left
_KINDS = {kind.__name__: kind for kind in EVENT_KINDS}
_STORAGE_EVENTS = frozenset(kind for kind in _KINDS.values() if kind._fields[0] == "storage")
# The fields of a ledger that are stored beside its events.
_FIELDS = (
    "batch_size", "num_parameters", "notes", "doubtful_bytes", "late_bytes", "unit",
    "own_optimizer", "is_recorded",
)  # fmt: skip
_ERRORS = (PlannerError, ContractError, UnsupportedError, UsageError)


# A PlannerError is how a recording ended; a plain dict is a library's answer about a model's name.
Cached = Ledger | PlannerError | dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A file of the cache. Times are seconds since the epoch."""

    path: Path
    key: Key
    num_bytes: int
    used: float


def folder() -> Path:
    """The folder of ledgers, in PLANNER_CACHE_DIR or the platform's cache folder."""
    return cache_directory() / "ledgers"


def load(key: Key) -> Cached | None:
    """The content of the file of `key`, which counts as used now; None without a whole file."""
    path = _path(key)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES)
    except OSError:
        return None
    content = decode(data, key)
    if content is not None:
        with suppress(OSError):
            os.utime(path)
    return content


def store(key: Key, content: Cached) -> None:
    """Writes a file, and removes those that were unused for longest where all files have more than
    `MAX_CACHE_BYTES`. A failure costs only the next recording: it is a warning, printed once."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, encode(key, content))
        _evict(path.parent)
    except OSError as error:
        _warn_once(f"Recordings cannot be kept in {path.parent}: {error.strerror or error}.")


def entries() -> list[Entry]:
    """All files of the cache in this format, the last used first."""
    listed = []
    for path in folder().glob(f"*{SUFFIX}"):
        with suppress(OSError, ValueError, KeyError), path.open("rb") as file:
            if file.readline(1024).startswith(FORMAT + b" "):
                key = json.loads(file.readline(MIB))
                stat = path.stat()
                listed.append(Entry(path, key, stat.st_size, stat.st_mtime))
    return sorted(listed, key=lambda entry: -entry.used)


def clear() -> int:
    """Removes all files of the cache, of any format. Returns their number. Raises OSError."""
    paths = list(folder().glob(f"*{SUFFIX}"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def encode(key: Key, content: Cached) -> bytes:
    """The bytes of a file."""
    body: dict[str, Any]
    if isinstance(content, PlannerError):
        kind = next(c for c in type(content).__mro__ if c in _ERRORS)
        body = {"error": [kind.__name__, content.message, content.way_out]}
    else:
        body = {"found": content} if isinstance(content, dict) else _pack(content)
    packed = zlib.compress(json.dumps(body, separators=(",", ":")).encode())
    payload = json.dumps(key).encode() + b"\n" + packed
    return b"%s %s\n%s" % (FORMAT, hashlib.sha256(payload).hexdigest().encode(), payload)


def decode(data: bytes, key: Key) -> Cached | None:
    """The content of a file; None if it is not whole, or of another key or format."""
    header, _, payload = data.partition(b"\n")
    if header != b"%s %s" % (FORMAT, hashlib.sha256(payload).hexdigest().encode()):
        return None
    file_key, _, packed = payload.partition(b"\n")
    try:
        if json.loads(file_key) != key:
            return None
        body = json.loads(zlib.decompressobj().decompress(packed, _MAX_LEDGER_BYTES))
        if "error" in body:
            return _make_error(*body["error"])
        return dict(body["found"]) if "found" in body else _unpack(body)
    except (ValueError, KeyError, IndexError, TypeError, StopIteration, zlib.error):
        return None


def _pack(ledger: Ledger) -> dict[str, Any]:
    """The different events without their storages, in "rows"; "events" has the row of each event,
    and "storages" the difference of each storage to the one before."""
    rows: dict[tuple[Any, ...], int] = {}
    numbers, steps, storage = [], [], 0
    for event in ledger.events:
        values: tuple[Any, ...] = tuple(event)
        if event._fields[0] == "storage":
            steps.append(values[0] - storage)
            storage, values = values[0], values[1:]
        row = (type(event).__name__, *values)
        numbers.append(rows.setdefault(row, len(rows)))
    fields = {name: getattr(ledger, name) for name in _FIELDS}
    return {"rows": list(rows), "events": numbers, "storages": steps, **fields}


def _unpack(body: dict[str, Any]) -> Ledger:
    rows = []
    for name, *values in body["rows"]:
        values = [tuple(value) if isinstance(value, list) else value for value in values]
        rows.append((_KINDS[name], values))
    events: list[Event] = []
    steps = iter(body["storages"])
    storage = 0
    for number in body["events"]:
        kind, values = rows[number]
        if kind in _STORAGE_EVENTS:
            storage += next(steps)
            events.append(kind(storage, *values))
        else:
            events.append(kind(*values))
    fields = {name: body[name] for name in _FIELDS}
    return Ledger(tuple(events), **{**fields, "notes": tuple(body["notes"])})


def _make_error(kind: str, message: str, way_out: str) -> PlannerError:
    error: PlannerError = {c.__name__: c for c in _ERRORS}[kind](message, way_out)
    return error


def _path(key: Key) -> Path:
    text = json.dumps(key, sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}{SUFFIX}"


def _evict(directory: Path) -> None:
    """Removes the files that were unused for longest, beyond the bound, and unfinished ones that
    killed writers left."""
    total = 0
    for used, num_bytes, path in sorted(_files(directory), reverse=True):
        total += num_bytes
        is_stale = path.suffix != SUFFIX and used < time.time() - _STALE_SECONDS
        if is_stale or total > MAX_CACHE_BYTES:
            path.unlink(missing_ok=True)


def _files(directory: Path) -> Iterator[tuple[float, int, Path]]:
    """(time of last use, bytes, path) of each file."""
    for path in directory.iterdir():
        if path.suffix in (SUFFIX, ".tmp"):
            with suppress(FileNotFoundError):
                stat = path.stat()
                yield stat.st_mtime, stat.st_size, path


@cache
def _warn_once(text: str) -> None:
    print(text, file=sys.stderr)


# The keys: all that a recorded step depends on.

Key = dict[str, Any]
_PROJECT_PACKAGES = frozenset(("planner", "search"))
# The folders whose code decides what a recorded ledger holds.
_MAKERS = (
    "core/schema", "ledger", "libraries", "machine/emulated", "memory", "recording", "step",
    "training",
)  # fmt: skip
_SOURCE_SUFFIXES = (".py", ".c", ".h")


def ledger_key(model: Model, setting: TrainSetting, batch: int) -> Key | None:
    """The key of a recorded ledger: the model, its source files outside installed packages, the
    setting without its batch, and versions. None if the source of a factory is not found."""
    packages = {"torch", getattr(model, "library", "")}
    if setting.needs_torchao:
        packages.add("torchao")
    if setting.optimizer_family == "lion":
        packages.add("timm")
    sources: dict[str, str] = {}
    if isinstance(model, FactoryModel):
        if _find_source(model.parts[0]) is None:
            return None
        sources = _read_sources(model.parts[0]).digests
        packages |= _read_sources(model.parts[0]).packages
    return {
        "title": model.title,
        "model": {"kind": type(model).__name__, **model.model_dump(mode="json")},
        "setting": setting.model_dump(mode="json", exclude={"batch_size"}),
        "batch": batch,
        "sources": sources,
        "workspace": os.environ.get(WORKSPACE_VARIABLE, ""),
        "versions": _versions(packages - _PROJECT_PACKAGES),
    }


def name_key(fields: Key) -> Key:
    """The key of a library's answer about a model's name. `fields` has "library", "name" and all
    else that decides the answer."""
    library = fields["library"]
    return {
        "title": f"{library}:{fields['name']}",
        "name": fields,
        "versions": _versions({library, "torch"}),
    }


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of planner, of Python and of the installed ones among `packages`."""
    installed = {name: installed_version(name) for name in sorted(filter(None, packages))}
    return {
        "planner": f"{planner.__version__} ({source_digest()})",
        "python": ".".join(map(str, sys.version_info[:2])),
        **{name: text for name, text in installed.items() if text},
    }


class _Sources(NamedTuple):
    """The digest of each of the user's files that importing a module reads, by module name; the
    installed packages that these files import; and the files, with the time of their last
    change."""

    digests: dict[str, str]
    packages: set[str]
    files: dict[str, tuple[Path, int]]


@cache
def _read_sources(module: str) -> _Sources:
    digests: dict[str, str] = {}
    files: dict[str, tuple[Path, int]] = {}
    packages, seen = set(_PROJECT_PACKAGES), set[str]()
    pending = [module]
    while pending:
        name = pending.pop()
        top = name.partition(".")[0]
        if name in seen or top in packages or top in sys.stdlib_module_names:
            continue
        seen.add(name)
        file = _find_source(name)
        if file is None:  # a name in a module, or a module without Python source
            continue
        if _is_installed(file):
            packages.add(top)
            continue
        files[name] = (file, _modified_ns(file))
        data = file.read_bytes()
        digests[name] = hashlib.sha256(data).hexdigest()[:16]
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        parent = name.rpartition(".")[0]
        pending += [*_imported_names(data, package), *([parent] if parent else [])]
    return _Sources(digests, packages, files)


def has_changed(module: str) -> bool:
    """Whether a module's files differ from those of its keys so far; if so, its next key reads them
    anew. A module without a file counts as changed: nobody can tell."""
    files = _read_sources(module).files
    source, _ = files.get(module, (None, 0))
    is_same = source is not None and source == _find_source(module)
    is_same = is_same and all(_modified_ns(file) == ns for file, ns in files.values())
    if not is_same:
        _read_sources.cache_clear()
    return not is_same


def _modified_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _find_source(module: str) -> Path | None:
    """The Python file of a module, found without an import."""
    package, *names = module.split(".")
    for folder in _package_folders(package):
        path = folder.joinpath(package, *names)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    return None


def _package_folders(package: str) -> Iterator[Path]:
    """The folders that a package may lie in: the current one, those of Python's path, and that of
    an editable install."""
    yield from (Path.cwd(), *map(Path, sys.path))
    with suppress(ValueError):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]


def _is_installed(file: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def _imported_names(source: bytes, package: str) -> Iterator[str]:
    """The names that a file of `package` imports: modules, and names that may be modules."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def source_digest(rooms: tuple[str, ...] = _MAKERS) -> str:
    """A digest of the source that makes ledgers, or of other `rooms`: paths of folders, relative to
    that of `planner`. The version says too little while the source is worked on."""
    digest = hashlib.sha256()
    for room in rooms:
        for file in sorted((Path(planner.__file__).parent / room).rglob("*.*")):
            if file.suffix in _SOURCE_SUFFIXES:
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
