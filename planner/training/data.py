"""The user's data as a training reads it: folders of pictures by class, or a Dataset of the user's.

Finding the data imports no torch; opening it imports the library that reads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.core.errors import (
    PlannerError,
    UnsupportedError,
    UsageError,
    nearest,
    printable,
    shorten,
)
from planner.core.files import named_path
from planner.core.schema.model import is_factory
from planner.core.schema.record import Augmentation, Pipeline
from planner.libraries.factories import check_factory, load_factory

if TYPE_CHECKING:
    from torch.utils.data import Dataset

# torchvision/datasets/folder.py: IMG_EXTENSIONS.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
AUGMENTATION = Augmentation()
WAY_OUT = (
    "Pass a folder with a folder of pictures per class (or with train/ of such), or "
    "MODULE:FACTORY, a function that returns a torch Dataset."
)


class BadItemError(PlannerError):
    """One item of the data cannot be loaded. The message says which one, and why."""

    def __init__(self, message: str) -> None:  # one argument: torch builds it again from a worker's
        reason = message.rpartition("BadItemError: ")[2].strip().partition("\n")[0]
        super().__init__(reason, "Mend or remove it: a training stops there too.")


@dataclass(frozen=True)
class Data:
    """Data by their name. `folder` holds the folders of the classes, and is None for a factory. The
    counts are None where only the opened Dataset knows them."""

    location: str
    folder: Path | None = None
    num_items: int | None = None
    num_classes: int | None = None


def find_data(text: str) -> Data:
    """The data that `text` names, without opening a picture. Raises UsageError where there are none
    or some cannot be read."""
    path = named_path(text, "data").expanduser()
    if printable(text) != text:
        raise UsageError(f"{shorten(text)} is no name that a record can hold.", "Rename it.")
    if path.is_dir():
        return _find_pictures(path.resolve())
    if path.is_file():
        raise UsageError(f"{path} is a file.", WAY_OUT)
    if is_factory(text):
        check_factory(text)
        return Data(text)
    raise UsageError(f"there is no folder {str(path)!r}.{_suggest_folder(path)}", WAY_OUT)


def _find_pictures(path: Path) -> Data:
    folder = next((path / name for name in ("train", "training") if (path / name).is_dir()), path)
    count, classes = 0, 0
    try:
        for entry in sorted(folder.iterdir()):
            if entry.is_dir():
                num_in_class = sum(
                    name.lower().endswith(EXTENSIONS)
                    for _, _, files in os.walk(entry, onerror=_raise_error, followlinks=True)
                    for name in files
                )
                if not num_in_class:
                    raise UsageError(
                        f"the class {printable(entry.name)!r} of {folder} has no pictures, and "
                        "torchvision's ImageFolder refuses it.",
                        "Remove the empty folder, or put its pictures into it.",
                    )
                count, classes = count + num_in_class, classes + 1
    except OSError as error:
        raise UsageError(
            f"{printable(str(error.filename))} cannot be read: {error.strerror}.",
            f"Give yourself the right to read it: chmod -R u+rX {printable(str(folder))}",
        ) from None
    if not count:
        raise UsageError(f"{folder} has no pictures in folders of classes.", WAY_OUT)
    return Data(str(path), folder, count, classes)


def _raise_error(error: OSError) -> None:
    raise error


def _suggest_folder(path: Path) -> str:
    """The folder beside a mistyped path whose name is nearest, as a question."""
    parent = path.parent
    if not parent.is_dir():
        return ""
    try:
        names = nearest(path.name, (entry.name for entry in parent.iterdir() if entry.is_dir()))
    except OSError:
        return ""
    return f" Did you mean {str(parent / names[0])!r}?" if names else ""


@dataclass(frozen=True)
class OpenData:
    """A Dataset, and the function that makes a batch of its items (None: torch's default)."""

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any] | None = None


def open_data(data: Data, pipeline: Pipeline, size: tuple[int, int]) -> OpenData:
    """The data as a training loads it: pictures of `size` (height, width) pixels, with the
    augmentation of Swin's authors, since a loader must cost what it costs in the training.

    Raises UnsupportedError where the pipeline's library is not installed, PlannerError where a
    factory returns no data set.
    """
    if data.folder is None:
        return _open_factory(data.location)
    try:
        from planner.training.pictures import build_transform
        from planner.training.train import Setting

        setting = Setting(
            height=size[0], width=size[1], pipeline=pipeline, erasing=AUGMENTATION.erasing,
            auto_augment=AUGMENTATION.auto_augment, interpolation=AUGMENTATION.interpolation,
        )  # fmt: skip
        picture_transform, collate = build_transform(setting, train=True), None
        if pipeline == "timm":
            from timm.data.loader import fast_collate

            collate = fast_collate
        dataset = _open_pictures(data.folder, picture_transform)
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
        library = "timm and torchvision" if pipeline == "timm" else "torchvision"
        raise UnsupportedError(
            f"pictures are read with {library}, which cannot be imported: {error}.",
            f"Install what belongs to this torch: pip install {library.replace(' and', '')}",
        ) from None
    return OpenData(dataset, collate)


def _open_factory(location: str) -> OpenData:
    from torch.utils.data import DataLoader, IterableDataset

    dataset: Any = load_factory(location)()
    collate = None
    if isinstance(dataset, DataLoader):
        dataset, collate = dataset.dataset, dataset.collate_fn
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise PlannerError(
            f"{location} returned {type(dataset).__name__}, not a torch.utils.data.Dataset.",
            "Return the data set itself: with __getitem__ and __len__, or an IterableDataset.",
        )
    if not is_stream and not len(dataset):
        law = f"{location} returned a data set without items."
        raise PlannerError(law, "Return one with items: does its folder hold any?")
    return OpenData(dataset if is_stream else _name_faulty_items(dataset, location), collate)


def _name_faulty_items(data: Any, location: str) -> Any:
    from torch.utils.data import Dataset

    class NamedItems(Dataset[Any]):
        """The user's data, with errors that name the item."""

        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, index: int) -> Any:
            try:
                return data[index]
            except Exception as error:
                reason = " ".join(str(error).split())
                raise BadItemError(
                    f"item {index} of {location} cannot be loaded: {type(error).__name__}: {reason}"
                ) from error

    return NamedItems()


def _open_pictures(folder: Path, transform_picture: Any) -> Any:
    from PIL import Image
    from torchvision.datasets import ImageFolder

    class Pictures(ImageFolder):  # type: ignore[misc]
        """torchvision's ImageFolder, with errors that name the file."""

        def __getitem__(self, index: int) -> tuple[Any, int]:
            path, label = self.samples[index]
            try:
                picture = self.loader(path)
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                reason = str(error).replace(repr(path), "").rstrip()
                raise BadItemError(f"{printable(path)} cannot be decoded: {reason}") from None
            return self.transform(picture), label

    return Pictures(folder, transform_picture)
