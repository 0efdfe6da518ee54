"""torch Datasets over sources: pictures by number, a stream of them, or a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema.loading import DataSource
from planner.libraries.factory import load_factory
from planner.training.loading.items import Items, Shards, open_items
from planner.training.loading.pictures import BadItemError
from planner.training.loading.pipelines import Steps

Blame = Callable[[str, BaseException], None]


def _raise(item: str, error: BaseException) -> NoReturn:
    raise BadItemError(str(error), item) from error


class PictureSet(Dataset[tuple[Any, int]]):
    """Pictures by number: read, decoded and transformed."""

    def __init__(self, items: Items, steps: Steps) -> None:
        self.items, self.steps = items, steps

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return self.items.name(index)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        try:
            data, label = self.items.read(index)
            return self.steps.transform(self.steps.decode(data)), label
        except BadItemError as error:
            raise BadItemError(error.reason, self.name(index)) from None


class PictureStream(IterableDataset[tuple[Any, int]]):
    """Pictures one after another, from shards. What is broken is told to `blame`: by default it
    ends the stream."""

    def __init__(self, source: DataSource, steps: Steps, endless: bool, train: bool) -> None:
        self.steps = steps
        self.blame: Blame = _raise
        self.shards = Shards(source, endless, train, lambda item, error: self.blame(item, error))

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for name, data, label in self.shards:
            try:
                yield self.steps.transform(self.steps.decode(data)), label
            except BadItemError as error:
                self.blame(name, error)


class Repeated(IterableDataset[Any]):
    """An iterable data set again and again, so that no epoch ends."""

    def __init__(self, inner: IterableDataset[Any]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        while True:
            number = -1
            for number, item in enumerate(self.inner):  # noqa: B007
                yield item
            if number < 0:
                return


class EndlessSampler(Sampler[int]):
    """Epoch after epoch of `num_items` numbers, or of those in `among`, each shuffled anew."""

    def __init__(self, num_items: int, seed: int, among: Sequence[int] | None = None) -> None:
        self.numbers = torch.as_tensor(among) if among is not None else torch.arange(num_items)
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        while True:
            order: Tensor = torch.randperm(len(self.numbers), generator=self.generator)
            yield from map(int, self.numbers[order])


def load_own(source: DataSource) -> tuple[Dataset[Any], Callable[[list[Any]], Any] | None]:
    """(data set, its collation where it has one) of a user's factory.

    Raises PlannerError where it returns no Dataset; of a DataLoader both are taken.
    """
    made = load_factory(source.location)()
    if isinstance(made, DataLoader):
        return made.dataset, made.collate_fn
    if isinstance(made, Dataset) or (hasattr(made, "__getitem__") and hasattr(made, "__len__")):
        try:
            is_empty = not isinstance(made, IterableDataset) and not len(made)
        except Exception as error:  # whatever a user's own code raises
            said = f"{type(error).__name__}: {error}"
            raise PlannerError(f"len() of what {source.location} returned fails: {said}") from error
        if is_empty:
            raise PlannerError(f"{source.location} returned a data set without items.")
        return made, None
    raise PlannerError(
        f"{source.location} returned {type(made).__name__}, not a torch.utils.data.Dataset.",
        "Return the data set itself: with __getitem__ and __len__, or an IterableDataset.",
    )


def open_dataset(source: DataSource, steps: Steps, *, endless: bool, train: bool) -> Dataset[Any]:
    """The data set of a source of pictures. Raises PlannerError where it cannot be read."""
    if source.kind == "shards":
        return PictureStream(source, steps, endless, train)
    if source.kind == "factory":
        raise UnsupportedError(
            f"{source.location} makes its items itself.", "Take the pipeline 'own' for it."
        )
    return PictureSet(open_items(source, train), steps)
