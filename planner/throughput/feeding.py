"""What a training reaches that a loader feeds: the law of the two rates.

L is the loader's rate by itself and S the step's on a batch that lies in the device's memory, both
in images/s; W are worker processes, C the processors that this process may keep busy, c and s
seconds of processor time per image of loading and of the step.

- Workers, and a step on a device of its own: `min(L, S)`. Loading and stepping are two stages with
  a queue of W × prefetch batches between them, and the slower one sets the pace of both.
- No workers: the training process loads a batch and then trains it: `1 / (1/L + 1/S)`.
- Workers, and a step on the same processors: a second has C seconds of them, and each image takes
  c + s, so there are at most `C / (c + s)` images: `min(L, S, C / (c + s))`. A step that keeps all
  C busy has s = C / S, and a loader that does has c = C / L: then this is `1 / (1/L + 1/S)`, what
  no workers reach. min(L, S) does not hold there: two cannot both have the whole machine.
- Accumulation changes nothing: all rates count images, and the queue does not care which of its
  batches ends an optimizer step.

Left out: what the training process itself does for each batch (take it from the queue, copy it to
the device where that waits), batches that take unequally long (where L and S are nearly equal, a
queue that is short at times costs some percent of the smaller), the start of workers in each epoch
where they do not persist, the page cache of a first epoch, memory bandwidth and hardware threads
that processors share, and a scheduler that wakes a step's threads late. On a GPU whose host runs
ahead, loading in the training process overlaps with the device's work: there the law of no workers
is a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from planner.core.schema.loading import LoaderBound

# Of the processors that a loader could keep busy, from which on they are what bounds it: the rest
# goes to waiting for disks and to the queue. A judgement.
_BUSY_SHARE = 0.8
# Stages of a loader that no further worker makes faster.
_ALIKE_FOR_ALL: tuple[LoaderBound, ...] = ("disk", "copy", "main process")

Limit = Literal["processors", "disk", "main process"]


@dataclass(frozen=True)
class Loading:
    """A loader by itself, its batches thrown away. `images_per_second` with `workers` processes (0:
    in the training process), `cpu_seconds` of processor time per image, `bound` what was found to
    bound it; None where that is not known."""

    images_per_second: float
    workers: int
    cpu_seconds: float | None = None
    bound: LoaderBound | None = None


@dataclass(frozen=True)
class Stepping:
    """A step on a batch that lies in the device's memory. `cpu_seconds` per image are of processors
    that workers use too: 0 where the step has a device of its own."""

    images_per_second: float
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Need:
    """What it would take to feed a step. `workers` by what one worker brings, `processors` by what
    an image takes (None: not known); `limit` is why no number of workers would do, None where this
    one would."""

    workers: int
    processors: float | None
    limit: Limit | None


def fed_rate(loader: Loading, step: Stepping, processors: float) -> float:
    """Images/s of `step` that `loader` feeds, on a machine with so many `processors`."""
    if loader.workers == 0:
        return serial_rate(loader.images_per_second, step.images_per_second)
    shared = shared_rate(loader, step, processors)
    return min(loader.images_per_second, step.images_per_second, shared)


def serial_rate(first: float, second: float) -> float:
    """Images/s of two stages, one after the other."""
    return 1 / (1 / first + 1 / second)


def shared_rate(loader: Loading, step: Stepping, processors: float) -> float:
    """Images/s that the processors allow, which loading and the step share; infinite where the step
    takes none of them."""
    if not step.cpu_seconds:
        return math.inf
    return processors / ((loader.cpu_seconds or 0.0) + step.cpu_seconds)


def bound_of(fed: float, step: Stepping, tolerance: float = 0.05) -> Literal["loader", "step"]:
    """Which of the two sets the pace: the step where, fed, it is as fast as on a batch in memory,
    but for a share of `tolerance`."""
    return "step" if fed >= step.images_per_second * (1 - tolerance) else "loader"


def waiting_share(fed: float, step: Stepping) -> float:
    """Of the time of a fed training, the share in which the step's device does not step."""
    return max(0.0, 1 - fed / step.images_per_second)


def worker_rate(loader: Loading, processors: float) -> float:
    """Images/s that one worker brings. Of workers that outnumber the processors they keep busy, as
    many count as there are processors."""
    working = float(max(loader.workers, 1))
    busy = loader.images_per_second * (loader.cpu_seconds or 0.0)
    if busy >= _BUSY_SHARE * min(working, processors):
        working = min(working, max(processors, 1.0))
    return loader.images_per_second / working


def needed_workers(loader: Loading, step: Stepping, processors: float) -> Need:
    """How many workers would bring `step` its images, each as many as one does now."""
    rate = step.images_per_second
    workers = math.ceil(round(rate / worker_rate(loader, processors), 6))
    taken = None if loader.cpu_seconds is None else rate * (loader.cpu_seconds + step.cpu_seconds)
    return Need(max(workers, 1), taken, _limit(loader, taken, processors))


def _limit(loader: Loading, taken: float | None, processors: float) -> Limit | None:
    if loader.bound in _ALIKE_FOR_ALL:
        return "disk" if loader.bound == "disk" else "main process"
    return "processors" if taken is not None and taken > processors else None
