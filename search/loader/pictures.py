"""How large the pictures of a folder are, from the heads of some of their files."""

from __future__ import annotations

from pathlib import Path

from planner.core.errors import PlannerError
from planner.core.schema.loading import DataSource
from planner.training.loading.folder import find_pictures, split_folder

SMALLER_PX = 256  # what a crop of 224 px is usually cut from
NUM_LOOKED_AT = 64


def smaller_share(source: DataSource) -> float | None:
    """The share of its pictures' pixels that is left where the short side has SMALLER_PX, by some
    of them; None where the source is no folder, or no head can be read."""
    if source.kind != "folder":
        return None
    try:
        from PIL import Image
    except ImportError:
        return None
    root = split_folder(Path(source.location), train=True)
    try:
        pictures = find_pictures(root)
    except (PlannerError, OSError):  # gone, or no longer readable: the probes say so
        return None
    step = max(1, len(pictures) // NUM_LOOKED_AT)
    pixels, smaller = [], []
    for index in range(0, len(pictures), step):
        try:
            with Image.open(root / pictures.name(index)) as head:
                width, height = head.size
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            continue  # the probes name it
        pixels.append(width * height)
        smaller.append(width * height * min(1.0, SMALLER_PX / max(min(width, height), 1)) ** 2)
    if not pixels:
        return None
    return sum(smaller) / max(sum(pixels), 1)
