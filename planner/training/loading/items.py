"""What a source holds, item by item: bytes and class of a picture, by number or one after another.

Importing this imports no torch; what a user's factory returns, `planner.training.loading.datasets`
opens.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.files import open_at_once
from planner.core.schema.loading import DataSource
from planner.core.units import MIB, format_bytes
from planner.training.loading.folder import Pictures, find_pictures, split_folder
from planner.training.loading.pictures import BadItemError
from planner.training.loading.sources import expand_shards, table_files

# The column of a table, or the field of a shard's sample, that holds what is looked for.
_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp")
_LABEL_NAMES = ("label", "labels", "fine_label", "cls", "class", "target")
# Samples of shards from which the next is drawn, as WebDataset's own examples do (webdataset,
# docs: `.shuffle(1000)`).
SHUFFLED_SAMPLES = 1000
# Larger than any picture of fewer pixels than PIL opens (179 million, of 3 bytes each).
MAX_FILE_BYTES = 512 * MIB


class Items(Protocol):
    """A source whose items have numbers."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """How a person finds the item: its file, or its row."""

    def read(self, index: int) -> tuple[bytes, int]:
        """Its picture, encoded, and its class. Raises BadItemError."""


class FolderItems:
    """The files of a folder of pictures."""

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def name(self, index: int) -> str:
        return self.pictures.name(index)

    def read(self, index: int) -> tuple[bytes, int]:
        data = _read_picture(self.pictures.root / self.pictures.name(index))
        return data, self.pictures.label(index)


def _read_picture(path: Path) -> bytes:
    """The bytes of a file. Raises BadItemError, also for what has no end, as a pipe."""
    try:
        with open(path, "rb", opener=open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadItemError("no regular file, and so no picture")
            if status.st_size > MAX_FILE_BYTES:
                raise BadItemError(f"a file of {format_bytes(status.st_size)} is no picture")
            return file.read()
    except OSError as error:
        raise BadItemError(error.strerror or type(error).__name__) from None


class TableItems:
    """The rows of a `datasets` table with a column of images."""

    def __init__(self, table: Any, location: str) -> None:
        datasets = _library("datasets")
        self.image = _first(_IMAGE_NAMES, table.column_names) or _of_type(table, datasets.Image)
        self.label = _first(_LABEL_NAMES, table.column_names)
        if self.image is None:
            raise UnsupportedError(
                f"{location} has no column of images: its columns are "
                f"{', '.join(table.column_names)}.",
                "Name the column of pictures 'image', or write a factory that returns a Dataset.",
            )
        columns = [self.image] + ([self.label] if self.label else [])
        table = table.select_columns(columns)
        if isinstance(table.features[self.image], datasets.Image):
            table = table.cast_column(self.image, datasets.Image(decode=False))
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def name(self, index: int) -> str:
        return f"row {index}"

    def read(self, index: int) -> tuple[bytes, int]:
        row = self.table[index]
        label = row.get(self.label) if self.label else 0
        return _row_bytes(row[self.image]), label if isinstance(label, int) else 0


def _row_bytes(found: Any) -> bytes:
    """The bytes of an undecoded cell: bytes, or bytes or the path of a file in a dictionary."""
    if isinstance(found, dict):
        if found.get("bytes") is None and found.get("path"):
            try:
                return _read_picture(Path(found["path"]))
            except BadItemError as error:
                raise BadItemError(f"{found['path']}: {error.reason}") from None
        found = found.get("bytes")
    if not isinstance(found, bytes):
        raise BadItemError(f"holds {type(found).__name__} and no encoded picture")
    return found


def open_items(source: DataSource, train: bool = True) -> Items:
    """The items of a folder or a table. Raises PlannerError where they cannot be read any more."""
    path = Path(source.location)
    if source.kind == "folder":
        items: Items = FolderItems(find_pictures(split_folder(path, train)))
    else:
        items = TableItems(_open_table(path, train), source.location)
    if not len(items):
        raise PlannerError(f"{source.location} has no pictures (any more).")
    return items


def _open_table(path: Path, train: bool) -> Any:
    """What `save_to_disk` wrote, or parquet files; of several splits the one that is asked for."""
    datasets = _library("datasets")
    files = table_files(path)
    try:
        if files:
            cache = os.fspath(_table_cache())
            return datasets.Dataset.from_parquet([str(f) for f in files], cache_dir=cache)
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # the library's own errors have no common kind
        said = " ".join(str(error).split())
        raise PlannerError(f"{path} cannot be read as a table of datasets: {said}") from error
    if isinstance(found, dict):
        wanted = ("train",) if train else ("validation", "val", "test")
        return found[_first(wanted, list(found)) or next(iter(found))]
    return found


def _table_cache() -> Path:
    """Where `datasets` keeps what it makes of parquet files: never beside them."""
    from planner.core.files import cache_directory

    return cache_directory() / "tables"


def _of_type(table: Any, kind: type) -> str | None:
    return next((name for name, f in table.features.items() if isinstance(f, kind)), None)


def _first(names: tuple[str, ...], known: list[str]) -> str | None:
    return next((name for name in names if name in known), None)


def _library(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        what = {"datasets": "A table of datasets", "webdataset": "Shards"}[name]
        raise UnsupportedError(
            f"{what} need {name}, which cannot be imported: {error}.",
            f"Install it: pip install {name}",
        ) from None


class Shards:
    """The samples of tar shards, in WebDataset's way: shuffled among shards and within a buffer.

    `endless` draws shards at random, again and again, in every worker; else each worker reads its
    own shards once. What is broken is told to `blame` and passed over.
    """

    def __init__(
        self,
        source: DataSource,
        endless: bool,
        shuffle: bool,
        blame: Callable[[str, BaseException], None],
    ) -> None:
        self.webdataset = _library("webdataset")
        self.files = [str(path) for path in expand_shards(source.location)]
        if not self.files:
            raise PlannerError(f"{source.location} has no shards (any more).")
        self.endless, self.shuffle, self.blame = endless, shuffle, blame

    def __iter__(self) -> Iterator[tuple[str, bytes, int]]:
        """(name, encoded picture, class) of each sample."""
        for sample in self._samples():
            name = f"{sample.get('__url__', '')}:{sample.get('__key__', '')}"
            field = _first(_IMAGE_NAMES, list(sample))
            if field is None:
                fields = ", ".join(key for key in sample if not key.startswith("__"))
                self.blame(name, BadItemError(f"a sample without a picture: it has {fields}"))
                continue
            label = _first(_LABEL_NAMES, list(sample))
            yield name, sample[field], _class_of(sample[label]) if label else 0

    def _samples(self) -> Iterator[dict[str, Any]]:
        wds = self.webdataset
        how: dict[str, Any] = {"handler": self._pass_over, "empty_check": False}
        if self.endless:
            stream = wds.WebDataset(self.files, resampled=True, shardshuffle=False, **how)
        else:
            shuffled = len(self.files) if self.shuffle else False
            stream = wds.WebDataset(self.files, shardshuffle=shuffled, **how)
        if self.shuffle:
            stream = stream.shuffle(SHUFFLED_SAMPLES)
        yield from stream

    def _pass_over(self, error: BaseException) -> bool:
        shard = next((f for f in self.files if f in str(error)), self.files[0])
        self.blame(shard, error)
        return True


def _class_of(found: bytes) -> int:
    text = found.decode(errors="replace").strip() if isinstance(found, bytes) else str(found)
    return int(text) if text.isdecimal() else 0
