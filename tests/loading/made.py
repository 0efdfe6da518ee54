"""Small folders of pictures, whole and broken, made for a test."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from PIL import Image

SIDE = 32


def encoded(mode: str = "RGB", kind: str = "JPEG", side: int = SIDE, **how: object) -> bytes:
    """A picture of a horizontal ramp, in a mode of Pillow's."""
    ramp = Image.linear_gradient("L").resize((side, side))
    image = ramp.convert("RGB").convert(mode) if mode not in ("I;16", "1") else ramp
    if mode == "I;16":
        image = ramp.convert("I").point(lambda value: value * 257).convert("I;16")
    elif mode == "1":
        image = ramp.convert("1")
    buffer = BytesIO()
    image.save(buffer, kind, **how)
    return buffer.getvalue()


def palette_with_transparency() -> bytes:
    image = Image.linear_gradient("L").resize((SIDE, SIDE)).convert("P")
    buffer = BytesIO()
    image.save(buffer, "PNG", transparency=bytes(range(256)))
    return buffer.getvalue()


def bomb() -> bytes:
    """A PNG of a few bytes that says it has 40,000 x 40,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


# Whole pictures of unusual kinds, and how each is called.
UNUSUAL: dict[str, Callable[[], bytes]] = {
    "cmyk.jpg": lambda: encoded("CMYK"),
    "grey.jpg": lambda: encoded("L"),
    "sixteen-bit.png": lambda: encoded("I;16", "PNG"),
    "one-bit.png": lambda: encoded("1", "PNG"),
    "palette.png": lambda: encoded("P", "PNG"),
    "palette-transparent.png": palette_with_transparency,
    "transparent.png": lambda: encoded("RGBA", "PNG"),
    "a-jpeg-by-another-name.png": lambda: encoded("RGB"),
}
# What no one can load, and a part of what is said of it.
BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty.jpg": (lambda: b"", "the file is empty"),
    "text.jpg": (lambda: b"no picture at all", "no picture that PIL knows"),
    "truncated.jpg": (lambda: encoded(side=256)[:1500], "truncated"),
    "truncated.png": (lambda: encoded("RGB", "PNG", side=256)[:300], "OSError"),
    "bomb.png": (bomb, "decompression bomb"),
}


def folder_of(root: Path, num_items: int = 16, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """`num_items` whole pictures, in turns among classes."""
    for name in classes:
        (root / name).mkdir(parents=True)
    for index in range(num_items):
        (root / classes[index % len(classes)] / f"{index:04d}.jpg").write_bytes(encoded())
    return root


def listing(root: Path) -> dict[str, tuple[int, int, bool]]:
    """Every entry below `root` with its size, its time and whether it is a folder."""
    found = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_size, status.st_mtime_ns, path.is_dir())
    return found
