"""One probe of a loader: made as a training makes it, drained as fast as it gives, in rounds.

W workers, P batches prefetched per worker. With W workers in step, W batches come at once and then
none for a while: what is timed is a round of W batches, one of each worker, divided by W. The
first W x P batches were ordered before the first was taken, and some were made while it was
awaited: they come free and are not counted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from planner.core.errors import PlannerError
from planner.core.schema.loading import LoaderSetting, LoaderStage, LoaderStatus
from planner.machine.host import read_host
from planner.training.loading.datasets import EndlessSampler, PictureSet
from planner.training.loading.loader import OpenData, load, open_data, pins, to_device
from planner.training.loading.pictures import BadItemError
from search.loader.protocol import LoaderOutcome, LoaderRequest
from search.loader.stages import COLD_SHARE, MOST_IMAGES, find_bound, time_stages
from search.loader.usage import Snapshot, UsageWatch
from search.loader.verdict import classify_loader
from search.loader.watching import NamingCollate, Watch, describe_item, name_of, watched
from search.probe.failure import count_kernel_kills, shorten
from search.probe.quiet import QuietWatch
from search.probe.stopping import StopRule
from search.probe.worker.report import Report

# What is kept of the deadline to say that it has come, in order.
_ENDING_SECONDS = 1.0
_ENDING_SHARE = 0.1
# Warm-up ends after this share of the time that is left, where W x P batches take longer.
_WARMUP_SHARE = 0.4
# Reading ahead for a warm page cache takes no longer than this share of the deadline.
_READING_SHARE = 0.25
# More pictures than a probe loads twice: what is read ahead.
_MOST_READ = 20_000
# An item that has been loading for this share of the probe is what it hangs in.
_LONG_SHARE = 0.2
_PROGRESS_SECONDS = 0.5
_JOIN_SECONDS = 1.0
# Rounds' worth of time that is kept before the clock answers.
_ROUNDS_KEPT = 1.5
# The mean may exceed the median by so much before it is told: some batches take long.
_STALLS = 0.15


def answer(request: LoaderRequest, deadline: float, report: Report) -> None:
    """Carry out one probe until `deadline` (an instant of `time.monotonic`) and answer it once.

    Whatever comes first answers: the probe, or the clock where something hangs. All workers are
    ended before, so that nothing else writes to the channel.
    """
    run = LoaderRun(request, deadline, report)
    clock = threading.Timer(max(0.0, run.answer_at - time.monotonic()), run.answer_late)
    clock.daemon = True
    clock.start()
    kills = count_kernel_kills()
    try:
        outcome = run.outcome()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for each worker
        endings = run.processes.endings()
        status, message = classify_loader(error, run.watch, endings, kills)
        outcome = run.failed(status, shorten(message))
    clock.cancel()
    run.answer(outcome)


class LoaderRun:
    """One probe as it goes, known to the thread that answers where it hangs."""

    def __init__(self, request: LoaderRequest, deadline: float, report: Report) -> None:
        self.request, self.deadline, self.report = request, deadline, report
        self.began = time.monotonic()
        left = deadline - self.began
        self.answer_at = deadline - max(_ENDING_SECONDS, _ENDING_SHARE * left)
        self.device = torch.device(request.device)
        self.watch = Watch(report.result_fd, request.probe_id)
        self.usage = UsageWatch()
        self.processes = Processes()
        self.rounds: list[float] = []
        self.num_batches = 0
        self.batch_bytes = 0
        self.dataset: Any = None
        self.first_batch_seconds: float | None = None
        self.stage_seconds: dict[LoaderStage, float] = {}
        self.flags: list[str] = []
        self._answered = threading.Lock()

    def outcome(self) -> LoaderOutcome:
        """The whole probe. Raises what the loader raises."""
        request, setting = self.request, self.request.setting
        self.report.enter("open")
        data = open_data(request.source, setting, endless=True)
        self.dataset = data.dataset
        numbers = self._numbers()
        if request.warm:
            self.report.enter("warm")
            seconds = self._share_of_time(_READING_SHARE)
            numbers = read_ahead(data.dataset, numbers, seconds, self.watch)
        self.report.enter("stages")
        self.stage_seconds = time_stages(data, setting, self.device, numbers, self.watch)
        batches = self._start(data, numbers if request.warm else None)
        self.report.enter("warm-up")
        self._drain(batches)
        self.report.enter("measure")
        before, quiet = Snapshot.take(), QuietWatch()
        began = time.monotonic()
        rule = StopRule(request, began, self.answer_at)
        self._time_rounds(batches, rule)
        seconds = time.monotonic() - began
        used = Snapshot.take() - before
        self.flags += rule.flags(self.rounds) + quiet.flags()
        return self._measured(used, seconds)

    def _numbers(self) -> list[int]:
        """Some items in the order in which the probe meets them; of a stream their count."""
        if isinstance(self.dataset, IterableDataset):
            return list(range(MOST_IMAGES))
        order = EndlessSampler(len(self.dataset), self.request.seed)
        most = max(MOST_IMAGES, _MOST_READ if self.request.warm else 0)
        return list(islice(order, min(most, len(self.dataset))))

    def _start(self, data: OpenData, among: list[int] | None) -> Iterator[Any]:
        """The loader at work, its first batch taken and looked at."""
        setting = self.request.setting
        if setting.pin_memory and not pins(setting, self.device):
            self.flags.append("there is no CUDA device to pin memory for: nothing was pinned")
        seen = replace(
            data,
            dataset=watched(data.dataset, self.watch),
            collate=NamingCollate(data.collate or default_collate, self.watch),
        )
        self.usage.start()
        self.report.enter("start")
        began = time.monotonic()
        with warnings.catch_warnings():
            # torch advises against more workers than processors: that is what is measured here.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = load(
                seen, setting, self.device, seed=self.request.seed, endless=True, among=among,
                context=self.processes,
            )  # fmt: skip
            batches = iter(loader)
        batch = self._next(batches)
        self.first_batch_seconds = time.monotonic() - began
        self.batch_bytes = num_bytes(batch)
        self.flags += odd_batch(batch, setting)
        return batches

    def _next(self, batches: Iterator[Any]) -> Any:
        """One more batch, on the device. Raises PlannerError where a stream yields none at all."""
        try:
            batch = next(batches)
        except StopIteration:
            raise PlannerError(f"{self.request.source.location} yields no items.") from None
        if self.device.type == "cuda":
            batch = to_device(batch, self.device)
        self.num_batches += 1
        return batch

    def _drain(self, batches: Iterator[Any]) -> None:
        """Take what was ordered before the first batch came, as long as there is time for it."""
        setting = self.request.setting
        until = time.monotonic() + self._share_of_time(_WARMUP_SHARE)
        ordered = max(1, setting.workers * (setting.prefetch_factor or 1))
        while self.num_batches < ordered:
            self._next(batches)
            if time.monotonic() > until:
                if self.num_batches < ordered:
                    self.flags.append(
                        f"warm-up was cut short after {self.num_batches} of {ordered} batches"
                    )
                return

    def _time_rounds(self, batches: Iterator[Any], rule: StopRule) -> None:
        """Rounds of one batch of each worker, until they are enough."""
        size = max(1, self.request.setting.workers)
        told = began = time.monotonic()
        while not rule.is_enough(self.rounds) and not self._is_late(size):
            for _ in range(size):
                self._next(batches)
            self._synchronize()
            now = time.monotonic()
            self.rounds.append((now - began) / size)
            began = now
            if now - told >= _PROGRESS_SECONDS:
                told = now
                self.report.progress(len(self.rounds), median(self.rounds))

    def _is_late(self, size: int) -> bool:
        """Whether one more round of `size` batches might not end before the clock answers."""
        if not self.rounds:
            return False
        return time.monotonic() + _ROUNDS_KEPT * size * max(self.rounds) > self.answer_at

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _share_of_time(self, share: float) -> float:
        return share * max(0.0, self.deadline - time.monotonic())

    def _measured(self, used: Snapshot, seconds: float) -> LoaderOutcome:
        """The outcome of whole rounds, `seconds` together, in which `used` was used."""
        setting = self.request.setting
        peaks = self.usage.stop()
        num_images = len(self.rounds) * max(1, setting.workers) * setting.batch_size
        cpus = read_host().cpus
        bound = find_bound(
            self.stage_seconds,
            workers=setting.workers,
            cpus=cpus,
            image_seconds=seconds / num_images,
            main_cpu_seconds=used.main_cpu / num_images,
            worker_cpu_seconds=used.worker_cpu / num_images,
            cold_share=used.cold_share,
        )
        self.flags += self._stalls(seconds) + peaks.flags()
        if used.cold_share >= COLD_SHARE:
            self.flags.append(
                f"{used.cold_share:.0%} of what was read came from the disk: the page cache was "
                "cold"
            )
        return self._outcome(
            "measured",
            cpu_seconds_per_image=(used.main_cpu + used.worker_cpu) / num_images,
            cold_share=used.cold_share,
            bound=bound,
        )

    def _stalls(self, seconds: float) -> list[str]:
        size = max(1, self.request.setting.workers)
        mean = seconds / len(self.rounds) / size
        if mean <= (1 + _STALLS) * median(self.rounds):
            return []
        images = self.request.setting.batch_size / mean
        return [f"some batches took long: on average {images:.4g} images/s"]

    def _outcome(self, status: LoaderStatus, message: str = "", **found: Any) -> LoaderOutcome:
        setting, peaks = self.request.setting, self.usage.peaks
        shared = None
        if setting.workers and self.batch_bytes:
            waiting = setting.workers * (setting.prefetch_factor or 1) * self.batch_bytes
            shared = max(peaks.shared_bytes, waiting)
        return LoaderOutcome(
            probe_id=self.request.probe_id,
            status=status,
            message=message,
            batch_seconds=tuple(self.rounds) if status == "measured" else (),
            first_batch_seconds=self.first_batch_seconds,
            stage_seconds=self.stage_seconds,
            worker_bytes=peaks.worker_bytes if setting.workers else None,
            main_bytes=peaks.main_bytes,
            shared_memory_bytes=shared,
            open_files=peaks.open_files or None,
            flags=tuple(self.flags),
            **found,
        )

    def failed(self, status: LoaderStatus, message: str) -> LoaderOutcome:
        self.flags += self.usage.stop().flags()
        return self._outcome(status, message)

    def answer_late(self) -> None:
        """What the clock says when the time is over: what was being loaded, and for how long."""
        seconds = time.monotonic() - self.began
        message = f"the deadline came in {self.report.phase}"
        loading = self.watch.loading()
        if loading and loading[0].seconds >= _LONG_SHARE * seconds:
            held = loading[0]
            where = f" by worker {held.worker}" if held.worker >= 0 else ""
            name = name_of(self.dataset, held.index)
            message += f": {name} had been loading{where} for {held.seconds:.3g} s"
        else:
            message += f": {self.num_batches} batches had come"
        self.answer(self.failed("timed_out", message))
        os._exit(0)

    def answer(self, outcome: LoaderOutcome) -> None:
        """End all workers, and tell. The second to come waits until the process ends."""
        self._answered.acquire()
        self.processes.end()
        self.report.say(outcome)


class Processes(ForkContext):
    """Starts workers by forking, which shares the watch with them, and knows how they ended."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[BaseProcess] = []

    def Process(self, *arguments: Any, **named: Any) -> BaseProcess:  # type: ignore[override]  # noqa: N802
        process = ForkProcess(*arguments, **named)
        self.started.append(process)
        return process

    def endings(self) -> set[int]:
        """The signals that ended workers."""
        return {-code for p in self.started if (code := p.exitcode) is not None and code < 0}

    def end(self) -> None:
        """At once: shut down in order, one that hangs would be waited for."""
        with contextlib.suppress(ValueError):  # only the main thread may
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in self.started:
            process.kill()
        for process in self.started:
            process.join(_JOIN_SECONDS)


def read_ahead(dataset: Any, numbers: list[int], seconds: float, watch: Watch) -> list[int]:
    """Read pictures into the page cache, for `seconds` at most; returns those that were read.

    Of a stream, and of a user's own Dataset, nobody knows which files it will read.
    """
    if not isinstance(dataset, PictureSet):
        return numbers
    until = time.monotonic() + seconds
    done = 0
    for done, number in enumerate(numbers, 1):  # noqa: B007
        watch.begin(number)
        with contextlib.suppress(BadItemError):
            dataset.items.read(number)
        watch.end("")
        if time.monotonic() > until:
            break
    return numbers[:done]


def num_bytes(batch: Any) -> int:
    """Bytes of all tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, dict):
        return sum(map(num_bytes, batch.values()))
    if isinstance(batch, tuple | list):
        return sum(map(num_bytes, batch))
    return 0


def odd_batch(batch: Any, setting: LoaderSetting) -> list[str]:
    """What of a batch is not as the setting says: its pictures' sides or type."""
    images = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not num_bytes(batch):
        return [f"a batch is {describe_item(batch)}, without a tensor: there are no pictures in it"]
    if not isinstance(images, torch.Tensor) or images.dim() != 4:
        return []
    told = []
    if tuple(images.shape[-2:]) != setting.image_size:
        height, width = setting.image_size
        told.append(
            f"a batch of pictures is {list(images.shape)}, and the setting says "
            f"{height} x {width} pixels"
        )
    if images.dtype == torch.float64:
        told.append("pictures are float64: twice the bytes of the float32 that a model takes")
    return told
