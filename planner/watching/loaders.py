"""How long a loop waits for its batches: a loader, timed from outside.

Neither way holds a batch: what the loop deletes is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Waited = Callable[[float, int], None]
"""(seconds, images): a batch came."""
Ended = Callable[[], None]
"""A pass over the data has ended: until the next one begins, nobody waits for data."""
_SEQUENCES = (list, tuple)


class TimedIterator:
    """An iterator whose waits are told. What it raises goes through unchanged."""

    def __init__(self, start: Callable[[], Iterator[Any]], waited: Waited, ended: Ended) -> None:
        self._waited, self._ended = waited, ended
        began = time.perf_counter()
        self._iterator = start()  # starts workers, where there are any
        waited(time.perf_counter() - began, 0)

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._ended()
            raise
        self._waited(time.perf_counter() - began, count_images(batch))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


class Timed:
    """A loader, or anything else to iterate over, whose batches are timed and counted. Everything
    else that is asked of it is the loader's own."""

    def __init__(self, loader: Iterable[Any], waited: Waited, ended: Ended) -> None:
        self.__dict__.update(_loader=loader, _waited=waited, _ended=ended)

    def __iter__(self) -> TimedIterator:
        loader = self.__dict__["_loader"]
        return TimedIterator(lambda: iter(loader), self._waited, self._ended)

    def __next__(self) -> Any:  # what was given was an iterator already
        return next(iter(self))

    def __len__(self) -> int:
        return len(self.__dict__["_loader"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_loader"], name, value)


def time_in_place(loader: Any, waited: Waited, ended: Ended) -> None:
    """Time an object that others hold already, and that must stay what it is (`isinstance`,
    attributes that a trainer sets): its class becomes a subclass that differs in `__iter__` only.
    Raises TypeError where an object's class cannot be changed."""
    plain: Any = type(loader)
    if getattr(plain, "_planner_times_it", False):
        return

    def timed(self: Any) -> TimedIterator:
        return TimedIterator(lambda: plain.__iter__(self), waited, ended)

    def reduced(self: Any, protocol: Any) -> Any:
        """A copy, also one in another process, is the plain loader again."""
        _, arguments, *rest = plain.__reduce_ex__(self, max(protocol, 2))
        return _empty, (plain, *arguments[1:]), *rest

    members = {
        "__iter__": timed, "__reduce_ex__": reduced, "_planner_times_it": True,
        "__module__": plain.__module__, "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }  # fmt: skip
    # Not by assignment: accelerate's loaders show the class of another object as their own.
    object.__dict__["__class__"].__set__(loader, type(plain.__name__, (plain,), members))


def _empty(kind: Any, *arguments: Any) -> Any:
    """As pickle begins an object, before it is given its attributes."""
    return kind.__new__(kind, *arguments)


def count_images(batch: Any, depth: int = 4) -> int:
    """The first dimension of a batch's first tensor; 0 where there is none."""
    # Once for each batch of a training: a list is the usual one, and asked for first.
    if isinstance(batch, _SEQUENCES):
        parts = batch
    elif (shape := getattr(batch, "shape", None)) is not None:
        return int(shape[0]) if len(shape) else 0
    elif hasattr(batch, "values") and hasattr(batch, "keys"):
        parts = batch.values()
    else:
        return 0
    for part in parts if depth else ():
        if found := count_images(part, depth - 1):
            return found
    return 0
