"""What the user names as data, found: a folder of pictures, shards, a table, a factory. No torch.

Nothing is written into the data, and nothing of the user's code is run here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from planner.core.errors import UnsupportedError, UsageError, as_text, nearest, shorten
from planner.core.files import named_path
from planner.core.schema.any_model import is_factory
from planner.core.schema.loading import DataSource, Pipeline
from planner.training.loading.folder import MARKER, find_pictures, split_folder

# What `datasets` writes beside its Arrow files: save_to_disk of a Dataset, and of a DatasetDict.
TABLE_FILES = ("state.json", "dataset_dict.json")
_MOST_RANGE = 1_000_000
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")

WAY_OUT = (
    "Pass a folder with a folder of pictures per class (or train/ and val/ with such), tar shards, "
    "a table of datasets, or MODULE:FACTORY, a function that returns a torch Dataset."
)


def find_source(text: str) -> DataSource:
    """The data that `text` names. Raises UsageError, in one line, where there are none."""
    path = named_path(text, "data").expanduser()
    if as_text(text) != text or "\0" in text:
        raise UsageError(f"{shorten(text)} is no name that a record can hold.", "Rename it.")
    if path.is_dir():
        return _folder_kind(path.resolve())(path.resolve())
    if path.is_file():
        return _file_kind(path.resolve())
    if path.suffix == ".tar" and (shards := expand_shards(text)):
        return _shards(str(path.absolute()), shards)
    if is_factory(text):
        return _factory(text)
    raise _nothing_there(path)


def check_pipeline(source: DataSource, pipeline: Pipeline) -> None:
    """Raises UnsupportedError where the pipeline cannot load such data."""
    if (source.kind == "factory") != (pipeline == "own"):
        raise UnsupportedError(
            f"{source.location} cannot be loaded with the pipeline {pipeline!r}.",
            "The pipeline 'own' loads what MODULE:FACTORY returns; the others load pictures.",
        )


def expand_shards(pattern: str) -> list[Path]:
    """The tar files of a folder, of one path, of a glob or of a range: `train-{000..146}.tar`."""
    path = Path(pattern).expanduser()
    if path.is_dir():
        return [file for file in sorted(path.glob("*.tar")) if file.is_file()]
    if match := _RANGE.search(path.name):
        first, last = match.groups()
        numbers = range(int(first), min(int(last), int(first) + _MOST_RANGE) + 1)
        names = [_RANGE.sub(f"{n:0{len(first)}d}", path.name, count=1) for n in numbers]
        return [file for name in names if (file := path.with_name(name)).is_file()]
    if "*" in path.name:
        return [file for file in sorted(path.parent.glob(path.name)) if file.is_file()]
    return [path] if path.is_file() else []


def table_files(path: Path) -> list[Path]:
    """The parquet files of a folder (its own, or of its `data` folder), or the one that `path` is;
    those of the training split where some are named so."""
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))
    return [file for file in files if file.name.startswith("train")] or files


def _folder_kind(path: Path) -> Callable[[Path], DataSource]:
    if any((path / name).is_file() for name in TABLE_FILES) or table_files(path):
        return _table
    try:
        names = {entry.name for entry in os.scandir(path)}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    if any(name.endswith(".tar") for name in names):
        return lambda found: _shards(str(found), expand_shards(str(found)))
    return _pictures


def _file_kind(path: Path) -> DataSource:
    if path.suffix == ".tar":
        return _shards(str(path), [path])
    if path.suffix == ".parquet":
        return _table(path)
    raise UsageError(f"{path} is a file, and no tar shard and no parquet table.", WAY_OUT)


def _pictures(path: Path) -> DataSource:
    found = find_pictures(split_folder(path, train=True))
    if not len(found):
        told = f" ({found.faults[0].item}: {found.faults[0].message})" if found.faults else ""
        raise UsageError(f"{path} has no pictures in folders of classes{told}.", WAY_OUT)
    return DataSource(
        kind="folder",
        location=str(path),
        num_items=len(found),
        num_classes=len(found.classes),
        total_bytes=found.total_bytes,
        fingerprint=found.fingerprint,
        synthetic=(path / MARKER).is_file(),
        faults=found.faults,
    )


def _shards(location: str, files: list[Path]) -> DataSource:
    """Of tar files the number of items is known once they were read, which takes too long."""
    return DataSource(
        kind="shards",
        location=location,
        total_bytes=sum(file.stat().st_size for file in files),
        fingerprint=_fingerprint(files),
    )


def _table(path: Path) -> DataSource:
    files = table_files(path) or sorted(path.rglob("*.arrow"))
    if not files:
        raise UsageError(f"{path} is a table of datasets without data: it has no *.arrow file.")
    return DataSource(
        kind="table",
        location=str(path),
        total_bytes=sum(file.stat().st_size for file in files),
        fingerprint=_fingerprint(files),
    )


def _factory(text: str) -> DataSource:
    """Known by the file of its module: what the function returns is seen when it is probed."""
    module = text.partition(":")[0]
    file = _module_file(module)
    if file is None:
        raise UsageError(
            f"there is neither a folder {text!r} nor a module {module!r} for a factory.",
            f"Python looked in {Path.cwd()} and among its installed packages.",
        )
    return DataSource(kind="factory", location=text, fingerprint=_fingerprint([file]))


def _module_file(module: str) -> Path | None:
    """The file of a module that was not imported for it, nor the packages around it."""
    import sys

    folders: Iterable[str] | None = [str(Path.cwd()), *sys.path]
    origin: str | None = None
    for end in range(module.count(".") + 1):
        name = ".".join(module.split(".")[: end + 1])
        spec = PathFinder.find_spec(name, list(folders) if folders is not None else None)
        if spec is None:
            return None
        origin, folders = spec.origin, spec.submodule_search_locations
    return Path(origin) if origin and Path(origin).is_file() else None


def _fingerprint(files: Iterable[Path]) -> str:
    """Of the files' names, sizes and times."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _nothing_there(path: Path) -> UsageError:
    """Names the nearest of what lies beside a path that was mistyped."""
    parent = path.parent
    while not parent.is_dir():
        path, parent = parent, parent.parent
    try:
        near = nearest(path.name, (entry.name for entry in os.scandir(parent)))
    except OSError:
        near = []
    hint = f" Did you mean {str(parent / near[0])!r}?" if near else ""
    return UsageError(f"there is no folder or file {str(path)!r}.{hint}", WAY_OUT)
