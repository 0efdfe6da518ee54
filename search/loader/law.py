"""The law of a loader's rate, in plain functions: what workers, processors, the disk and the main
process each allow, and the smallest of these.

n workers, P processors that can be kept busy, w seconds of one process for one image, c seconds of
a processor for one image, m seconds of the main process for one image. Without workers one process
does all: 1 / w. With them the rate is the smallest of

    n / w       the workers, each with its own image
    P / c       the processors
    1 / m       the main process, which takes every batch
    D           the disk, in images/s

and a little under it where two of them are close, since images differ and workers wait in turn.
Numbers may be arrays: one entry for each draw of what is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schema.loading import LoaderRecord, LoaderSetting

Floats = NDArray[np.float64]

BYTES_PER_CHANNEL = 4  # float32; timm's loader hands over bytes and divides on the device
# What PIL takes to decode a photograph of ImageNet's size and torchvision to crop it, in seconds of
# one processor: an assumption, and only until the first probe has said what it is here.
ASSUMED_IMAGE_SECONDS = 0.01
# What the main process does for a batch beside its bytes (a queue, two file descriptors, two
# mappings), in seconds, and the rate at which it copies bytes to pinned memory: assumed likewise.
ASSUMED_BATCH_SECONDS = 0.5e-3
ASSUMED_COPY_RATE = 5e9


@dataclass(frozen=True)
class ImageCost:
    """What one image costs one process without others: seconds on the clock, and of a processor."""

    seconds: float
    cpu_seconds: float


def image_cost(record: LoaderRecord) -> ImageCost:
    """The cost that a probe without workers shows: by its stages, timed with one thread as a worker
    has, where they are known. A main process may use many threads, which wait for each other."""
    seconds = 1 / record.images_per_second if record.images_per_second else ASSUMED_IMAGE_SECONDS
    cpu = record.cpu_seconds_per_image or seconds
    stages = stages_seconds(record)
    if stages:
        return ImageCost(stages, min(cpu, stages))
    return ImageCost(max(seconds, cpu), cpu)


def stages_seconds(record: LoaderRecord) -> float:
    """What the stages of a worker take for one image, one after the other; 0 where unknown."""
    return sum(seconds for stage, seconds in record.stage_seconds.items() if stage != "copy")


def batch_bytes(setting: LoaderSetting) -> int:
    """A batch as it crosses from a worker: [B, 3, H, W] and a label of 8 bytes for each image."""
    height, width = setting.image_size
    channel = 1 if setting.pipeline == "timm" else BYTES_PER_CHANNEL
    return setting.batch_size * (3 * height * width * channel + 8)


def main_seconds(setting: LoaderSetting) -> float:
    """What one image costs the main process where workers do the rest, as assumed."""
    copying = batch_bytes(setting) / ASSUMED_COPY_RATE if setting.pin_memory else 0.0
    return (ASSUMED_BATCH_SECONDS + copying) / setting.batch_size


@dataclass(frozen=True)
class Ceilings:
    """What no number of workers exceeds, in images/s; `crowding` is the power of P / (n + 1) by
    which processes beyond the processors slow all, `sharpness` that of the smallest of all."""

    processors: Floats
    main: Floats
    disk: Floats
    crowding: Floats
    sharpness: Floats


def rate_with_workers(workers: int, seconds: Floats, cpus: float, ceilings: Ceilings) -> Floats:
    """Images/s of so many workers (one and more), each of which takes `seconds` for an image."""
    crowd = max((workers + 1) / max(cpus, 1.0), 1.0)
    processors = ceilings.processors * crowd**-ceilings.crowding
    allowed = (workers / seconds, processors, ceilings.main, ceilings.disk)
    return softest(allowed, ceilings.sharpness)


def softest(limits: Sequence[Floats], sharpness: Floats) -> Floats:
    """The smallest of `limits`, rounded off where others are near: a power mean, never above it."""
    least = np.minimum.reduce(list(limits))
    total = sum((limit / least) ** -sharpness for limit in limits)
    found: Floats = least * total ** (-1 / sharpness)
    return found


def expected_rate(setting: LoaderSetting, cost: ImageCost, cpus: float) -> float:
    """Images/s by the law with nothing in its way but workers, processors and the main process:
    what settings are ranked by before any probe of them."""
    if setting.workers == 0:
        return 1 / cost.seconds
    one = np.ones(1)
    ceilings = Ceilings(
        processors=one * cpus / cost.cpu_seconds, main=one / main_seconds(setting),
        disk=one * np.inf, crowding=one * 0.05, sharpness=one * 6.0,
    )  # fmt: skip
    return float(rate_with_workers(setting.workers, one * cost.seconds, cpus, ceilings)[0])
