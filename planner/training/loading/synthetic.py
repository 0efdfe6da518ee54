"""A folder of made JPEGs, of ImageNet's sizes and about its cost to decode, for who has no data.

What a JPEG takes to decode grows with its pixels and its bytes. Of ImageNet is published: 469 x 387
pixels on average (image-net.org/challenges/LSVRC/2014/index), and 147,897,477,120 bytes of archive
(ILSVRC2012_img_train.tar) for 1,281,167 pictures, so 115 kB each. The pictures here are noise whose
amplitude falls with its frequency, as in photographs (1/f: Field 1987, J. Opt. Soc. Am. A 4), over
a smooth gradient of colours. They teach a model nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.schema.loading import DataSource
from planner.training.loading.folder import MARKER
from planner.training.loading.sources import find_source

VERSION = 1
NUM_CLASSES = 10
# Width, height, share. Chosen so that their means are the published ones (tested): the most common
# sides of photographs of that time, and some smaller and larger ones.
SIZES = (
    (500, 375, 0.40), (500, 333, 0.18), (375, 500, 0.15), (333, 500, 0.03), (500, 500, 0.04),
    (400, 300, 0.06), (300, 225, 0.05), (250, 250, 0.03), (640, 480, 0.03), (800, 600, 0.02),
    (1024, 768, 0.01),
)  # fmt: skip
# Chosen so that the mean of the files is about the published 115 kB (tested).
_QUALITIES = (86, 94)
_AMPLITUDES, _COLOUR_AMPLITUDE = (40.0, 70.0), 10.0
_SIDE = 1088
_NUM_CANVASES = 8
_TELL_EVERY = 100


def make_synthetic(folder: Path, count: int, seed: int = 0) -> DataSource:
    """Write `count` pictures into `folder/CLASS/`, the same for the same seed. Takes about 4 ms of
    one core each. A folder of the same count and seed that is whole is left as it is.

    Raises UsageError where the folder holds anything that is not ours, PlannerError where it cannot
    be written.
    """
    if count < 1:
        raise UsageError(f"{count} pictures make no data.", "Pass a number from 1 on.")
    marker = folder / MARKER
    order = {"version": VERSION, "count": count, "seed": seed}
    made = _made_before(folder, marker)
    if made == {**order, "whole": True}:
        return find_source(str(folder))
    written = 0
    try:
        if made is not None:
            _clear(folder)
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps({**order, "whole": False}), encoding="utf-8")
        for done in _write_all(folder, count, seed):
            written = done
        marker.write_text(json.dumps({**order, "whole": True}), encoding="utf-8")
    except OSError as error:
        raise PlannerError(
            f"{folder} cannot be written: {error.strerror} (after {written} of {count} pictures).",
            "Free some room (a picture takes about 115 kB), or name another folder.",
        ) from None
    return find_source(str(folder))


def _made_before(folder: Path, marker: Path) -> Any:
    """What was made in a folder of ours; None where there is nothing yet."""
    try:
        entries = {entry.name for entry in os.scandir(folder)}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{folder} cannot be used: {error.strerror}.") from None
    if not entries:
        return None
    if MARKER not in entries:
        raise UsageError(
            f"{folder} holds files that were not made by planner.", "Name a new or an empty folder."
        )
    try:
        return json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _clear(folder: Path) -> None:
    """Remove the pictures that were made here, and nothing else."""
    for number in range(NUM_CLASSES):
        for path in (folder / _class_name(number)).glob("[0-9]*.jpg"):
            path.unlink()


def _class_name(number: int) -> str:
    return f"class-{number:02d}"


def _write_all(folder: Path, count: int, seed: int) -> Iterator[int]:
    """Write the pictures, on all cores; yields how many there are now and then."""
    image = _pillow()
    random = np.random.default_rng(seed)
    canvases = [image.fromarray(_canvas(random)) for _ in range(min(_NUM_CANVASES, count))]
    classes = min(NUM_CLASSES, count)
    for number in range(classes):
        (folder / _class_name(number)).mkdir(exist_ok=True)

    def write(index: int) -> None:
        data = _picture(canvases, np.random.default_rng((seed, index)))
        (folder / _class_name(index % classes) / f"{index:06d}.jpg").write_bytes(data)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for first in range(0, count, _TELL_EVERY):
            last = min(first + _TELL_EVERY, count)
            list(pool.map(write, range(first, last)))
            yield last


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UnsupportedError(
            f"pictures are made with Pillow, which cannot be imported: {error}.",
            "Install it: pip install pillow",
        ) from None
    return Image


def _canvas(random: np.random.Generator) -> NDArray[np.uint8]:
    """[side, side, 3]: noise as light and, less of it, as colour, over a gradient."""
    base, slope, tint = (f((3,)) for f in (
        lambda n: random.uniform(70, 180, n), lambda n: random.uniform(-50, 50, n), random.normal,
    ))  # fmt: skip
    ramp = np.linspace(-1, 1, _SIDE, dtype=np.float32)[:, None, None]
    light = random.uniform(*_AMPLITUDES) * _noise(random)[:, :, None]
    colour = _COLOUR_AMPLITUDE * _noise(random)[:, :, None] * tint
    return (base + ramp * slope + light + colour).clip(0, 255).astype(np.uint8)


def _noise(random: np.random.Generator) -> NDArray[np.float64]:
    """Of amplitude 1/f, mean 0 and deviation 1: [side, side]."""
    frequency = np.hypot(np.fft.fftfreq(_SIDE)[:, None], np.fft.rfftfreq(_SIDE)[None])
    frequency[0, 0] = np.inf
    shape = frequency.shape
    real, imaginary = (random.standard_normal(shape, dtype=np.float32) for _ in range(2))
    spectrum = real + 1j * imaginary
    noise: NDArray[np.float64] = np.fft.irfft2(spectrum / frequency, (_SIDE, _SIDE))
    noise /= noise.std()
    return noise


def _picture(canvases: list[Any], random: np.random.Generator) -> bytes:
    """One JPEG: a window of a canvas."""
    shares = np.array([share for _, _, share in SIZES])
    width, height, _ = SIZES[random.choice(len(SIZES), p=shares / shares.sum())]
    left, top = random.integers(_SIDE - width + 1), random.integers(_SIDE - height + 1)
    window = canvases[random.integers(len(canvases))].crop((left, top, left + width, top + height))
    buffer = BytesIO()
    window.save(buffer, "JPEG", quality=int(random.integers(*_QUALITIES)))
    return buffer.getvalue()
