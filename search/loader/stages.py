"""Where one image's time goes, stage by stage, in one process without others; and what bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from planner.core.schema.loading import LoaderBound, LoaderSetting, LoaderStage
from planner.training.loading.datasets import PictureSet, PictureStream
from planner.training.loading.loader import OpenData, to_device
from search.loader.watching import Watch

# Images that are timed by themselves, and how long that may take.
MOST_IMAGES = 32
MOST_SECONDS = 3.0
_COPIES = 3
# A main process that is busy for this share of the time has no more to give. A judgement.
_BUSY_SHARE = 0.85
# Workers that use less than this share of the processor time they could have wait for something:
# the disk, where they read from it. A judgement.
_IDLE_SHARE = 0.6
COLD_SHARE = 0.05

T = TypeVar("T")


class _Clock:
    """Adds up the seconds of each stage: of this thread's processor, which other programs do not
    lengthen, or of the clock on the wall, where the stage may wait for something."""

    def __init__(self) -> None:
        self.seconds: dict[LoaderStage, float] = {}

    def time(self, stage: LoaderStage, work: Callable[[], T], waits: bool = False) -> T:
        clock = time.perf_counter if waits else time.thread_time
        began = clock()
        done = work()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + clock() - began
        return done


def time_stages(
    data: OpenData,
    setting: LoaderSetting,
    device: torch.device,
    numbers: Sequence[int],
    watch: Watch,
) -> dict[LoaderStage, float]:
    """Seconds of one image in each stage, of those of `numbers` that can be loaded; {} where none
    can, or they make no batch: the loader will say so itself.

    What a user's Dataset does with an item, whatever it is, counts as `transform`. A stream is
    read from its beginning. torch has one thread meanwhile, as it has in a worker.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    clock = _Clock()
    try:
        items = list(_load(data.dataset, clock, numbers, watch))
        if not items:
            return {}
        batch = clock.time("collate", lambda: (data.collate or default_collate)(items))
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        return {}
    finally:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        clock.seconds["copy"] = _time_copy(batch, device, setting)
    return {stage: seconds / len(items) for stage, seconds in clock.seconds.items()}


def _load(
    dataset: Dataset[Any], clock: _Clock, numbers: Sequence[int], watch: Watch
) -> Iterator[Any]:
    """The items that can be loaded, one after another, each stage timed."""
    until = time.monotonic() + MOST_SECONDS
    load_one = _loading(dataset, clock)
    for count, number in enumerate(numbers[:MOST_IMAGES]):
        if time.monotonic() > until:
            return
        watch.begin(number if not isinstance(dataset, IterableDataset) else count)
        try:
            item = load_one(number)
        except StopIteration:
            return
        except Exception:  # whatever it is, the loader comes to it and tells it
            if isinstance(dataset, IterableDataset) and not isinstance(dataset, PictureStream):
                return
            continue
        finally:
            watch.end("")
        yield item


def _loading(dataset: Dataset[Any], clock: _Clock) -> Callable[[int], Any]:
    """How one item is loaded and timed: ours in their steps, another's as a whole."""
    if isinstance(dataset, PictureSet):
        return lambda number: _finish(
            dataset, clock.time("read", lambda: dataset.items.read(number), waits=True), clock
        )
    if isinstance(dataset, PictureStream):
        samples = iter(dataset.shards)
        return lambda _: _finish(
            dataset, clock.time("read", lambda: next(samples), waits=True)[1:], clock
        )
    if isinstance(dataset, IterableDataset):
        stream = iter(dataset)
        return lambda _: clock.time("transform", lambda: next(stream), waits=True)
    return lambda number: clock.time("transform", lambda: dataset[number], waits=True)


def _finish(
    dataset: PictureSet | PictureStream, sample: tuple[bytes, int], clock: _Clock
) -> tuple[Any, int]:
    picture = clock.time("decode", lambda: dataset.steps.decode(sample[0]))
    return clock.time("transform", lambda: dataset.steps.transform(picture)), sample[1]


def _time_copy(batch: Any, device: torch.device, setting: LoaderSetting) -> float:
    """Seconds to bring a batch to a CUDA device, the least of a few; pinned as the setting says."""
    pinned = torch.utils.data._utils.pin_memory.pin_memory(batch) if setting.pin_memory else batch
    least = float("inf")
    for _ in range(_COPIES):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        to_device(pinned, device)
        torch.cuda.synchronize(device)
        least = min(least, time.perf_counter() - began)
    return least


def find_bound(
    stage_seconds: Mapping[LoaderStage, float],
    *,
    workers: int,
    cpus: float,
    image_seconds: float,
    main_cpu_seconds: float,
    worker_cpu_seconds: float,
    cold_share: float,
) -> LoaderBound | None:
    """What the rate is bound by. All seconds are of one image: `image_seconds` as it was loaded,
    `main_cpu_seconds` and `worker_cpu_seconds` of the processors.

    The main process, where it is busy nearly all the time while workers load (the copy, where
    copying takes at least half of that). The disk, where what was read came from it and the
    workers used little of the processors that they have; else the longest of the stages that the
    workers, or without them the one process, go through.
    """
    if not stage_seconds:
        return None
    copy = stage_seconds.get("copy", 0.0)
    if workers and main_cpu_seconds >= _BUSY_SHARE * image_seconds:
        return "copy" if copy >= main_cpu_seconds / 2 else "main process"
    if copy >= _BUSY_SHARE * image_seconds:
        return "copy"
    capacity = min(max(workers, 1), cpus)
    used = (worker_cpu_seconds if workers else main_cpu_seconds) / image_seconds
    if cold_share >= COLD_SHARE and used < _IDLE_SHARE * capacity:
        return "disk"
    longest = max((s for s in stage_seconds if s != "copy"), key=lambda s: stage_seconds[s])
    return "disk" if longest == "read" else longest
