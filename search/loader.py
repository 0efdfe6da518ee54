"""`find_loader`: the fastest `DataLoader` of some data on this machine, by a doubling walk.

Workers 0, 1, 2, 4 … until two doublings gain less than 5%, then a deeper queue and pinned memory;
each is a real loader of torch's over the real data, measured for some seconds once its queue is
steady.
"""

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any, NamedTuple

import psutil
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from planner.core.errors import PlannerError, UsageError
from planner.core.schema.record import (
    MAX_WORKERS,
    DataResult,
    LoaderBound,
    LoaderRun,
    LoaderSetting,
    Pipeline,
)
from planner.core.units import format_bytes, format_rate, format_seconds
from planner.machine.host import read_host
from planner.training.data import BadItemError, Data, OpenData, find_data, open_data
from search.probe.device import choose_device, versions
from search.probe.evidence import busy_seconds

GAIN = 1.05  # what twice the workers must gain to be worth their memory
AS_GOOD = 0.98  # of the best rate: as good, as far as a few seconds can tell
PATIENCE = 2  # so many doublings that gain less end the walk: one may be a busy second
MEASURE_SECONDS, FIRST_BATCH_SECONDS = 3.0, 120.0  # of each loader; of a first batch at most
DEEPER = 4  # batches that each worker prefetches, in place of torch's 2
# The share of the processors' time from which on they bound loading; the rest waits for the queue.
BUSY = 0.85
CROWDED = 0.1  # of the processors, taken by other programs: worth a note
COLD = 0.05  # of the bytes read, from the disk: then it may bound loading

Say = Callable[[str], None]


class Surroundings(NamedTuple):
    """The share of a loader's bytes that came from the disk, and how many processors others kept
    busy."""

    disk_share: float | None
    busy_processors: float


def find_loader(
    data: str,
    *,
    pipeline: Pipeline = "torchvision",
    batch_size: int = 64,
    image_size: tuple[int, int] = (224, 224),
    max_workers: int | None = None,
    device: str = "auto",
    seconds: float = 90.0,
    on_progress: Say = lambda text: None,
) -> DataResult:
    """The fastest loader that the walk found; Ctrl-C ends it with the best so far.

    Args:
        data: A folder with a folder of pictures per class (or with `train/` of such), or
            MODULE:FACTORY, a function that returns a Dataset.
        pipeline: Whose transforms make tensors of pictures, `torchvision` or `timm`.
        batch_size: The micro-batch that a loader makes.
        image_size: (height, width) in pixels of what comes out.
        max_workers: No more workers than these (default: twice the processors).
        device: Where the batches go: on a CUDA device pinned memory is measured too.
        seconds: After these it begins no further loader.
        on_progress: Called with a line for each loader measured.

    Raises:
        UsageError: There are no data, or an option is out of its bounds.
        UnsupportedError: The library of the pipeline is not installed.
        PlannerError: An item cannot be loaded, or workers die; the message says which and why.
    """
    for name, value in (("batch_size", batch_size), ("image_size", min(image_size))):
        if value < 1:
            raise UsageError(f"{name} is {value}, and is at least 1.", f"Pass {name} 64.")
    source = find_data(data)
    where = torch.device(choose_device(device))
    first = LoaderSetting(
        pipeline="own" if source.folder is None else pipeline, batch_size=batch_size,
        workers=0, pin_memory=where.type == "cuda",
    )  # fmt: skip
    opened = open_data(source, first.pipeline, image_size)
    walk = _LoaderWalk(opened, time.monotonic() + seconds, on_progress)
    try:
        with warnings.catch_warnings():  # more workers than processors are tried on purpose
            warnings.filterwarnings("ignore", message=".*worker processes in total")
            walk.go(first, max_workers)
    except KeyboardInterrupt:
        if not walk.runs:
            raise
        walk.notes.append("Interrupted: the best of what was measured.")
    return walk.result(source, image_size)


@dataclass
class _LoaderWalk:
    opened: OpenData
    ends_at: float
    say: Say
    runs: list[LoaderRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    surroundings: dict[LoaderSetting, Surroundings] = field(default_factory=dict)

    @property
    def best(self) -> LoaderRun:
        """The fastest loader; of those that are as good, the one that takes least of the
        machine."""
        highest = max(run.images_per_second for run in self.runs)
        as_good = [run for run in self.runs if run.images_per_second >= AS_GOOD * highest]
        return min(as_good, key=lambda run: (run.setting.workers, run.setting.prefetch_factor))

    def go(self, first: LoaderSetting, max_workers: int | None) -> None:
        """Measures the walk's loaders; the first must run."""
        limit = min(max_workers or 2 * max(1, round(read_host().cpus)), MAX_WORKERS)
        rate = self.measure(first)
        workers, in_vain = 1, 0
        while workers <= limit and in_vain < PATIENCE and self.has_time():
            new_rate = self.try_out(first.model_copy(update={"workers": workers}))
            if new_rate is None:
                break
            in_vain = 0 if new_rate >= GAIN * rate else in_vain + 1
            rate, workers = max(rate, new_rate), workers * 2
        best = self.best.setting
        variants = [{"prefetch_factor": DEEPER}] * (best.workers > 0)
        variants += [{"pin_memory": False}] * best.pin_memory
        for change in variants:
            if self.has_time():
                self.try_out(best.model_copy(update=change))
        # The best two are measured again: a busy second may have misled.
        ranked = sorted(self.runs, key=lambda run: -run.images_per_second)
        for run in ranked[:2]:
            if len(ranked) > 1 and self.has_time():
                self.try_out(run.setting)

    def has_time(self) -> bool:
        return time.monotonic() < self.ends_at

    def try_out(self, setting: LoaderSetting) -> float | None:
        """The rate of a loader; None, with a note, where its workers die: fewer of them could
        load."""
        try:
            return self.measure(setting)
        except BadItemError:
            raise
        except PlannerError as error:
            self.notes.append(f"{setting.title}: {' '.join(str(error).split())}")
            self.say(f"{setting.title}: {error.message}")
            return None

    def measure(self, setting: LoaderSetting) -> float:
        """The images/s of a loader now. `runs` keeps the mean with those measured before."""
        run, self.surroundings[setting] = _measure(self.opened, setting)
        for number, other in enumerate(self.runs):
            if other.setting == setting:
                mean = (run.images_per_second + other.images_per_second) / 2
                self.runs[number] = run.model_copy(update={"images_per_second": mean})
                break
        else:
            self.runs.append(run)
        self.say(f"{setting.title}: {format_rate(run.images_per_second)} images/s")
        return run.images_per_second

    def result(self, data: Data, image_size: tuple[int, int]) -> DataResult:
        best, processors = self.best, read_host().cpus
        bound = self.bound(best, processors)
        disk_share, others = self.surroundings[best.setting]
        dataset = self.opened.dataset
        num_items = data.num_items or (len(dataset) if hasattr(dataset, "__len__") else None)
        if bound == "disk":
            self.notes.append(
                f"{disk_share:.0%} of the bytes came from the disk while processors were "
                "idle: a faster disk, or the data in memory, loads faster."
            )
        elif disk_share is not None and disk_share < COLD and data.folder is not None:
            self.notes.append("The files lay in the page cache: a first epoch may be slower.")
        if others > CROWDED * processors:
            self.notes.append(
                f"Other programs kept {others:.1f} of {processors:g} processors busy: without "
                "them it loads faster."
            )
        if not self.has_time():
            self.notes.append("Time ran out: a longer --budget may find more.")
        return DataResult(
            location=data.location, num_items=num_items,
            num_classes=data.num_classes, image_size=image_size, processors=processors,
            setting=best.setting, images_per_second=best.images_per_second, bound=bound,
            runs=tuple(self.runs), disk_share=disk_share,
            versions=versions(), date=datetime.now(UTC).isoformat(timespec="seconds"),
            notes=tuple(self.notes),
        )  # fmt: skip

    def bound(self, best: LoaderRun, processors: float) -> LoaderBound:
        """What bounds the loader, so that no further worker would help. Without workers all is the
        work of one process."""
        disk_share, others = self.surroundings[best.setting]
        usable = min(processors - others, max(1, best.setting.workers))
        if best.images_per_second * best.cpu_seconds >= BUSY * usable:
            return "processors" if best.setting.workers else "main process"
        return "disk" if (disk_share or 0) >= COLD else "main process"


def _measure(opened: OpenData, setting: LoaderSetting) -> tuple[LoaderRun, Surroundings]:
    """A loader in its steady state, the share of its bytes that came from the disk, and how many
    processors other programs kept busy meanwhile.

    Raises BadItemError for an item that cannot be loaded, PlannerError for workers that die.
    """
    batches = _batches(opened, setting)
    try:
        began = time.monotonic()
        next(batches)
        first = time.monotonic() - began
        # What workers have prefetched at the start comes at once.
        ahead = setting.workers * setting.prefetch_factor
        until = time.monotonic() + MEASURE_SECONDS / 2
        for _ in islice(batches, ahead):
            if time.monotonic() > until:
                break
        workers = psutil.Process().children(recursive=True)
        pids = [os.getpid(), *(worker.pid for worker in workers)]
        start, before, busy_before = time.monotonic(), _used(pids), busy_seconds()
        count, fewest = 0, max(2, 2 * setting.workers)
        for count, _ in enumerate(batches, 1):
            passed = time.monotonic() - start
            if passed > MEASURE_SECONDS and (count >= fewest or passed > 4 * MEASURE_SECONDS):
                break
        seconds = time.monotonic() - start
        images = count * setting.batch_size
        own, read, missed = (now - then for now, then in zip(_used(pids), before, strict=True))
        others = max(0.0, busy_seconds() - busy_before - own) / seconds
        run = LoaderRun(
            setting=setting, images_per_second=images / seconds, cpu_seconds=own / images,
            first_batch_seconds=first,
        )  # fmt: skip
    except RuntimeError as error:
        raise _worker_died(error) from error
    finally:
        del batches
        gc.collect()  # ends the workers
    return run, Surroundings(missed / read if read > 0 else None, others)


def _batches(opened: OpenData, setting: LoaderSetting) -> Iterator[Any]:
    """Batches without end, so that no worker runs dry between two epochs."""
    dataset: Any = opened.dataset
    sampler = None
    if not isinstance(dataset, IterableDataset):
        sampler = RandomSampler(dataset, replacement=True, num_samples=2**40)
    loader = DataLoader(
        dataset, **{**setting.arguments, "persistent_workers": False}, sampler=sampler,
        collate_fn=opened.collate, timeout=FIRST_BATCH_SECONDS if setting.workers else 0,
    )  # fmt: skip
    while True:
        number = -1
        for number, batch in enumerate(loader):  # noqa: B007
            yield batch
        if number < 0:
            raise PlannerError(
                f"the data make no batch of {setting.batch_size}.", "Pass a smaller --batch-size."
            )


def _worker_died(error: RuntimeError) -> PlannerError:
    """The error for a worker that died, in torch's words, with what may have ended it."""
    message = " ".join(str(error).split())
    free = read_host().shared_memory_free_bytes
    room = f" (/dev/shm has {format_bytes(free)} free)" if free is not None else ""
    return PlannerError(
        f"a worker of the loader died: {message[:300]}",
        f"Workers are killed where memory or /dev/shm is full{room}, and end by faults of their "
        "own: 'planner data DATA --max-workers 1' shows whether one by itself runs.",
    )


def _used(pids: list[int]) -> tuple[float, int, int]:
    """(processor seconds, bytes read, bytes read from the disk) of these processes so far."""
    cpu, read, missed = 0.0, 0, 0
    for pid in pids:
        with suppress(psutil.Error):  # a worker that has ended
            process = psutil.Process(pid)
            times, files = process.cpu_times(), process.io_counters()
            cpu += times.user + times.system
            read, missed = read + files.read_chars, missed + files.read_bytes
    return cpu, read, missed


def loader_text(result: DataResult) -> str:
    """The answer as text: the loader, what bounds it, and the code to write."""
    best = next(run for run in result.runs if run.setting == result.setting)
    items = f" ({result.num_items:,} items)" if result.num_items else ""
    lines = [
        f"{format_rate(result.images_per_second)} images/s from {result.location}{items}: "
        f"{result.setting.title}.",
        f"  {format_seconds(best.cpu_seconds)} of processor time an image, on "
        f"{result.processors:g} processors; the first batch after "
        f"{format_seconds(best.first_batch_seconds)}.",
        f"  Bound by {_BOUNDS[result.bound]}.",
    ]
    lines += [f"  {note}" for note in result.notes]
    return "\n".join([*lines, "", *loader_code(result.setting)])


_BOUNDS = {
    "processors": "the processors: all that may be used are busy loading",
    "disk": "the disk",
    "main process": "the training process itself, which takes each batch from the queue",
}


def loader_code(setting: LoaderSetting) -> list[str]:
    """The lines of code that make the loader."""
    arguments = ", ".join(f"{name}={value}" for name, value in setting.arguments.items())
    head = "    dataset, shuffle=True, drop_last=True,"
    return ["loader = DataLoader(", head, f"    {arguments}", ")"]
