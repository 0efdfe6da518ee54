"""A folder per class of pictures, as torchvision's `ImageFolder` reads it: listed once, quickly.

The list of 1.3 million pictures is one block of bytes and one array of offsets: a list of Python
strings would be copied into every worker, page by page, as their reference counts are touched
(pytorch #13246).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.core.errors import as_text
from planner.core.schema.loading import ItemFault

# torchvision/datasets/folder.py: IMG_EXTENSIONS.
EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp",
)  # fmt: skip
TRAIN_NAMES, VALIDATION_NAMES = ("train", "training"), ("val", "valid", "validation", "test")
# Written by `planner.training.loading.synthetic` into folders of its own.
MARKER = ".planner-synthetic.json"
# The sizes of so many files are read, evenly spread; of more the total is extrapolated.
_MOST_SIZES = 10_000
_MOST_FAULTS = 50


def split_folder(path: Path, train: bool) -> Path:
    """`path/train` or `path/val` where there are such, else `path` itself."""
    for name in TRAIN_NAMES if train else VALIDATION_NAMES:
        if (path / name).is_dir():
            return path / name
    return path


@dataclass(frozen=True)
class Pictures:
    """The pictures below `root`, sorted by class and name. `ends` are where each path ends in
    `names`, `class_ends` how many pictures there are up to the end of each class."""

    root: Path
    classes: tuple[str, ...]
    names: bytes
    ends: NDArray[np.int64]
    class_ends: NDArray[np.int64]
    faults: tuple[ItemFault, ...] = ()
    total_bytes: int = 0
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, index: int) -> str:
        """The path of one picture, below `root`."""
        start = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(self.names[start : int(self.ends[index])])

    def label(self, index: int) -> int:
        """The number of its class."""
        return int(np.searchsorted(self.class_ends, index, side="right"))


@dataclass
class _Scan:
    """What is passed over on the way: named once, counted after that."""

    faults: list[ItemFault] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def fault(self, item: str, message: str) -> None:
        self.faults.append(ItemFault(item=as_text(item), message=message))

    def no_picture(self, name: str) -> None:
        suffix = os.path.splitext(name)[1].lower() or "no suffix"  # noqa: PTH122
        self.others[suffix] += 1
        self.examples.setdefault(suffix, name)

    def all(self) -> tuple[ItemFault, ...]:
        found = [
            ItemFault(
                item=as_text(self.examples[suffix]),
                message=f"no picture ({as_text(suffix)})",
                count=count,
            )
            for suffix, count in self.others.most_common()
        ]
        return tuple((self.faults + found)[:_MOST_FAULTS])


def find_pictures(root: Path) -> Pictures:
    """All pictures of `root/CLASS/…`, without opening one.

    An empty class, a folder that may not be read, a link that leads back to a folder above it, and
    files that are no pictures are named in `faults`.
    """
    scan = _Scan()
    classes = sorted(_folders(root, scan))
    names: list[bytes] = []
    class_ends = []
    for name in classes:
        before, blamed = len(names), len(scan.faults)
        names += sorted(os.fsencode(found) for found in _walk(root, name, scan, ()))
        class_ends.append(len(names))
        if len(names) == before and len(scan.faults) == blamed:
            scan.fault(name, "a class without pictures: torchvision's ImageFolder refuses it")
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    sizes, stamp = _sizes(root, names)
    total = round(sum(sizes) * len(names) / len(sizes)) if sizes else 0
    digest = hashlib.sha256("\0".join(classes).encode(errors="surrogateescape"))
    digest.update(str(class_ends).encode() + b"\0".join(names) + stamp)
    return Pictures(
        root=root,
        classes=tuple(classes),
        names=b"".join(names),
        ends=ends,
        class_ends=np.array(class_ends, dtype=np.int64),
        faults=scan.all(),
        total_bytes=total,
        fingerprint=digest.hexdigest()[:16],
    )


def _folders(root: Path, scan: _Scan) -> Iterator[str]:
    """The classes of `root`: its folders. Pictures beside them belong to no class."""
    loose = [entry for entry in os.scandir(root) if not _is_folder(entry)]
    for entry in loose:
        if entry.name.lower().endswith(EXTENSIONS):
            scan.fault(entry.name, "a picture outside of the folders of classes")
    yield from (entry.name for entry in os.scandir(root) if _is_folder(entry))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _is_special(entry: os.DirEntry[str]) -> bool:
    """What has no end to read to. A link that leads nowhere is a file, which cannot be read."""
    try:
        return not entry.is_file() and not stat.S_ISDIR(entry.stat().st_mode)
    except OSError:
        return False


def _walk(root: Path, below: str, scan: _Scan, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Pictures of a folder and of those in it; `above` are the folders that it lies in, which a
    link must not lead back to."""
    try:
        status = (root / below).stat()
        here = (status.st_dev, status.st_ino)
        entries = list(os.scandir(root / below))
    except OSError as error:
        scan.fault(below, f"a folder that cannot be read: {error.strerror}")
        return
    if here in above:
        scan.fault(below, "a link that leads back to a folder above it")
        return
    for entry in entries:
        name = f"{below}/{entry.name}"
        if entry.name.lower().endswith(EXTENSIONS) and not entry.is_dir(follow_symlinks=False):
            if _is_special(entry):
                scan.fault(name, "a pipe, a socket or a device is no picture")
            else:
                yield name
        elif _is_folder(entry):
            yield from _walk(root, name, scan, (*above, here))
        else:
            scan.no_picture(name)


def _sizes(root: Path, names: list[bytes]) -> tuple[list[int], bytes]:
    """The sizes of the files, of many a sample; and a text of their sizes and times."""
    step = max(1, -(-len(names) // _MOST_SIZES))
    sizes, stamp = [], []
    folder = os.fsencode(root)
    for name in names[::step]:
        try:
            status = os.stat(folder + b"/" + name)  # noqa: PTH116
        except OSError:
            stamp.append("gone")
            continue
        sizes.append(status.st_size)
        stamp.append(f"{status.st_size} {status.st_mtime_ns}")
    return sizes, "\n".join(stamp).encode()
