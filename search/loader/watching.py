"""What each process of a loader is loading, and what it could not load: known to the main one.

Workers are forked, so that a page of shared memory and the result channel are theirs too.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from planner.core import failures
from planner.core.errors import as_text
from planner.core.schema.loading import MAX_WORKERS, LoaderStatus
from planner.training.loading.datasets import PictureStream
from planner.training.loading.pictures import BadItemError
from planner.training.tasks.contract import describe
from search.loader.protocol import MAX_TEXT, FaultMessage
from search.probe.protocol import encode

# Items after a broken one that are tried in its place, one after another.
MOST_NEIGHBOURS = 16
# More broken items than these, and than this share, are no accident: the probe ends.
LEAST_FAULTS, FAULTY_SHARE = 8, 0.1
# What one process tells of broken items; the rest it only counts.
_MOST_TOLD = 200
_SLOT = struct.Struct("qd")  # the item's number, or -1; since when, by time.monotonic
_WORDS_BYTES = 4096
_FOR_ALL = (MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)
_NO_MORE_FILES = (23, 24)  # ENFILE, EMFILE: no fault of the item


class TooManyFaultsError(Exception):
    """So much is broken that a rate would say nothing."""


@dataclass(frozen=True)
class Loading:
    """What one process is at: `worker` -1 is the main one."""

    worker: int
    index: int
    seconds: float


class Watch:
    """Shared by all processes of one loader: the item that each loads, faults, and last words."""

    def __init__(self, result_fd: int, probe_id: str) -> None:
        self.result_fd, self.probe_id = result_fd, probe_id
        self._slots = mmap.mmap(-1, (MAX_WORKERS + 1) * _SLOT.size + _WORDS_BYTES)
        for worker in range(-1, MAX_WORKERS):
            self._set(worker, -1)
        self.num_seen = self.num_faults = self.num_told = 0
        self.loaded: list[str] = []  # names of what was loaded since the last collation
        self.is_open = True

    def begin(self, index: int) -> None:
        self.num_seen += 1
        self._set(_this_worker(), index)

    def end(self, name: str) -> None:
        self._set(_this_worker(), -1)
        self.loaded.append(name)

    def loading(self) -> list[Loading]:
        """What is being loaded now, the longest first."""
        now = time.monotonic()
        found = []
        for worker in range(-1, MAX_WORKERS):
            index, since = _SLOT.unpack_from(self._slots, (worker + 1) * _SLOT.size)
            if index >= 0:
                found.append(Loading(worker, index, now - since))
        return sorted(found, key=lambda loading: -loading.seconds)

    def blame(self, item: str, error: BaseException, is_neighbour: bool = False) -> None:
        """Tell of an item that cannot be loaded; raises TooManyFaultsError where it is one more
        than an accident. A neighbour was not drawn: broken ones lie together, and it counts for
        nothing."""
        message = describe_error(error)
        self.num_told += 1
        if self.num_told <= _MOST_TOLD:
            told = FaultMessage(
                probe_id=self.probe_id, item=_short(item), message=_short(message)
            )  # fmt: skip
            os.write(self.result_fd, encode(told))
        self.num_faults += not is_neighbour
        if self.num_faults > max(LEAST_FAULTS, FAULTY_SHARE * self.num_seen):
            self.give_up(
                error, f"{self.num_faults} of {self.num_seen} items cannot be loaded: "
                f"{item}: {message}",
            )  # fmt: skip

    def give_up(self, error: BaseException, message: str) -> None:
        """A broken picture is a fault of the data; what else a Dataset raises is a crash of it."""
        self.last_words("faulty" if isinstance(error, BadItemError) else "crashed", message)
        raise TooManyFaultsError(message) from error

    def last_words(self, status: LoaderStatus, message: str) -> None:
        """What the main process is to say of this loader; the first to speak is heard."""
        if self.heard() is not None:
            return
        text = json.dumps([status, as_text(message)[: _WORDS_BYTES // 8]]).encode()
        start = (MAX_WORKERS + 1) * _SLOT.size
        self._slots[start : start + len(text)] = text

    def heard(self) -> tuple[LoaderStatus, str] | None:
        text = self._slots[(MAX_WORKERS + 1) * _SLOT.size :].rstrip(b"\0")
        if not text:
            return None
        status, message = json.loads(text)
        return status, message

    def _set(self, worker: int, index: int) -> None:
        _SLOT.pack_into(self._slots, (worker + 1) * _SLOT.size, index, time.monotonic())


def _this_worker() -> int:
    info = get_worker_info()
    return -1 if info is None else info.id


def describe_error(error: BaseException) -> str:
    """A broken picture in its own words, anything else by its type and text."""
    if isinstance(error, BadItemError):
        return error.reason
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _short(text: str) -> str:
    return as_text(text)[:MAX_TEXT]


def watched(dataset: Dataset[Any], watch: Watch) -> Dataset[Any]:
    """`dataset`, watched: a broken item is told and another taken for it."""
    if isinstance(dataset, IterableDataset):
        return WatchedStream(dataset, watch)
    if hasattr(dataset, "__getitems__"):
        return WatchedBatches(dataset, watch)
    return WatchedSet(dataset, watch)


class WatchedSet(Dataset[Any]):
    """A data set by number."""

    def __init__(self, inner: Dataset[Any], watch: Watch) -> None:
        self.inner, self.watch = inner, watch

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def name(self, index: int) -> str:
        return name_of(self.inner, index)

    def __getitem__(self, index: int) -> Any:
        first: BaseException | None = None
        tried = min(MOST_NEIGHBOURS, len(self))
        for offset in range(tried):
            at = (index + offset) % len(self)
            self.watch.begin(at)
            try:
                item = self.inner[at]
            except _FOR_ALL:
                raise
            except Exception as error:
                if getattr(error, "errno", None) in _NO_MORE_FILES:
                    raise
                first = first or error
                self.watch.blame(self.name(at), error, is_neighbour=offset > 0)
                continue
            self.watch.end(self.name(at))
            return item
        assert first is not None
        words = f"{self.name(index)}: {describe_error(first)}"
        count = f"{tried} items in a row" if tried > 1 else "the only item"
        self.watch.give_up(first, f"{count} cannot be loaded; the first is {words}")
        return None


class WatchedBatches(WatchedSet):
    """A data set that loads the items of a batch at once; torch then calls this."""

    def __getitems__(self, indices: list[int]) -> Any:
        self.watch.begin(indices[0])
        try:
            items = self.inner.__getitems__(indices)  # type: ignore[attr-defined]
        except _FOR_ALL:
            raise
        except Exception:
            return [self[index] for index in indices]
        for index in indices:
            self.watch.end(self.name(index))
        return items


class WatchedStream(IterableDataset[Any]):
    """An iterable data set; what is broken in one of ours is passed over."""

    def __init__(self, inner: IterableDataset[Any], watch: Watch) -> None:
        self.inner, self.watch = inner, watch
        if isinstance(inner, PictureStream):
            inner.blame = watch.blame

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self.inner)
        number = 0
        while True:
            self.watch.begin(number)
            try:
                item = next(stream)
            except StopIteration:
                self.watch.end("")
                return
            except (*_FOR_ALL, TooManyFaultsError):
                raise
            except Exception as error:
                self.watch.give_up(error, f"item {number}: {describe_error(error)}")
            self.watch.end(f"item {number}")
            yield item
            number += 1


def name_of(dataset: Any, index: int) -> str:
    """A picture's file, else the item's number in the data set."""
    name = getattr(dataset, "name", None)
    if callable(name) and type(dataset).__module__.startswith(("planner.", "search.")):
        return str(name(index))
    return f"item {index}"


class NamingCollate:
    """A collation that says which item it stumbled over."""

    def __init__(self, collate: Callable[[list[Any]], Any], watch: Watch) -> None:
        self.collate, self.watch = collate, watch

    def __call__(self, items: list[Any]) -> Any:
        names, self.watch.loaded = self.watch.loaded[-len(items) :], []
        try:
            return self.collate(items)
        except Exception as error:
            told = why_not_collated(items, names, error)
            if told is not None:
                self.watch.last_words("faulty", told)
            raise


def why_not_collated(items: list[Any], names: list[str], error: BaseException) -> str | None:
    """The item that is not as the others, else what all of them are; None for an error that is
    none of the items'."""
    if not isinstance(error, TypeError | ValueError | RuntimeError | AttributeError | KeyError):
        return None
    if failures.is_shared_memory_failure(str(error)) or failures.is_allocation_failure(str(error)):
        return None
    kinds = [describe_item(item) for item in items]
    usual = max(kinds, key=kinds.count)
    for kind, name in zip(kinds, names, strict=False):
        if kind != usual:
            return f"{name} is {kind}, others are {usual}: they make no batch"
    first = names[0] if names else "item 0"
    said = " ".join(str(error).split())[:MAX_TEXT]
    return f"{first} is {usual}, of which no batch is made: {type(error).__name__}: {said}"


def describe_item(item: object) -> str:
    """By shapes and types, two levels deep: `(a tensor [3, 32, 32] float32, int)`."""
    if isinstance(item, tuple | list):
        return f"({', '.join(_describe_part(part) for part in item)})"
    if isinstance(item, dict):
        parts = (f"{key!r}: {_describe_part(value)}" for key, value in item.items())
        return f"{{{', '.join(parts)}}}"
    return _describe_part(item)


def _describe_part(part: object) -> str:
    if isinstance(part, Tensor):
        return f"{describe(part)} {str(part.dtype).removeprefix('torch.')}"
    shape, dtype = getattr(part, "shape", None), getattr(part, "dtype", None)
    if shape is not None and dtype is not None:
        return f"an array {list(shape)} {dtype}"
    return type(part).__name__
