"""A short real training run that a real loader feeds: steps on a batch in memory first, then fed.

Both are timed in one process, one after the other, so that what disturbs the machine disturbs them
alike. Runs only in the worker.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from planner.core.schema.loading import ItemFault
from planner.training.loading.loader import load, open_data
from planner.training.loading.pictures import BadItemError
from planner.training.tasks.contract import describe
from planner.training.tasks.making import GivenTask
from planner.training.tasks.trees import prepare
from planner.training.tasks.vision import Classification
from search.probe.processes import processor_seconds
from search.probe.protocol import FedMessage, FedRequest, OutcomeMessage
from search.probe.stopping import FedRule, StopRule
from search.probe.worker.measure import Run, carry_out
from search.probe.worker.meter import Meter
from search.probe.worker.report import Report
from search.probe.worker.subject import WatchedTraining

# Of the time until the deadline, that steps on the batch in memory may take.
_RESIDENT_SHARE = 0.25


class DataError(Exception):
    """The data are not what the model takes, or an item of them cannot be loaded."""

    def __init__(self, fault: ItemFault) -> None:
        super().__init__(f"{fault.item}: {fault.message}")
        self.fault = fault


def measure_fed(request: FedRequest, deadline: float, report: Report) -> OutcomeMessage:
    """Carry out one fed training until `deadline` (an instant of `time.monotonic`), say what only
    it can tell, and how it ended."""
    run = FedRun(request, deadline, report)
    outcome = carry_out(run)
    report.say(run.message())
    return outcome


@dataclass
class FedRun(Run):
    """`Run` with a loader: its outcome's steps are the fed ones."""

    resident: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    step_cpu_seconds: float | None = None
    fed_cpu_seconds: float | None = None
    fault: ItemFault | None = None

    def outcome(self) -> OutcomeMessage:
        request = cast("FedRequest", self.request)
        training, meter = self.set_up()
        self._time_resident(training, meter)
        self.report.enter("loader")
        samples = self._time_fed(request, training, meter)
        self.report.enter("check")
        self.flags += meter.flags()
        self._check(training, meter, self.phases)
        return self.measured(meter, samples, meter.memory())

    def message(self) -> FedMessage:
        """What was found until the run ended, however that was."""
        return FedMessage(
            probe_id=self.request.probe_id,
            wait_seconds=tuple(round(seconds, 9) for seconds in self.waits),
            resident_seconds=tuple(round(seconds, 9) for seconds in self.resident),
            step_cpu_seconds=self.step_cpu_seconds,
            fed_cpu_seconds=self.fed_cpu_seconds,
            fault=self.fault,
        )

    def _time_resident(self, training: WatchedTraining, meter: Meter) -> None:
        now = time.monotonic()
        rule = StopRule(self.request, now, now + _RESIDENT_SHARE * (self.deadline - now))
        before = time.process_time()
        self.resident = self._time(training, meter, self.phases, rule)
        images = len(self.resident) * self.request.images_per_step
        self.step_cpu_seconds = (time.process_time() - before) / images

    def _time_fed(
        self, request: FedRequest, training: WatchedTraining, meter: Meter
    ) -> list[float]:
        """Seconds of each fed step, its wait included. The first burst of the workers' batches goes
        before them: then as many come as are loaded."""
        accumulate = request.setting.accumulate
        with self._fed(request, training) as feed:
            for _ in range(1 + math.ceil(request.loader.workers / accumulate)):
                training.step(self.phases)
            meter.synchronize()
            self.report.enter("measure")
            meter.reset_peak()
            feed.waits.clear()
            before = processor_seconds()
            rule = FedRule(request, time.monotonic(), self.deadline)
            samples = self._time(training, meter, self.phases, rule)
            images = len(samples) * request.images_per_step
            self.fed_cpu_seconds = (processor_seconds() - before) / images
            waits = iter(feed.waits)
            self.waits = [sum(islice(waits, accumulate)) for _ in samples]
        return samples

    @contextmanager
    def _fed(self, request: FedRequest, training: WatchedTraining) -> Iterator[Feed]:
        """Within, `training` takes its micro-batches from the request's loader."""
        data = open_data(request.source, request.loader, endless=True)
        data = replace(data, dataset=named(data.dataset))
        loader = load(data, request.loader, training.device, endless=True)
        feed = Feed(loader, taker(request, training))
        training.feed = feed
        threads = torch.get_num_threads()
        if training.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            # As the plain script does: threads of a step that share processors with workers wait.
            torch.set_num_threads(max(1, threads - request.loader.workers))
        try:
            yield feed
        except DataError as error:
            self.fault = error.fault
            raise
        finally:
            torch.set_num_threads(threads)
            training.feed = None
            feed.close()


@dataclass
class Feed:
    """Batches of a loader for a training, without end; `waits` are the seconds that each took to
    come."""

    loader: Iterable[Any]
    take: Callable[[Any], Any]
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batches: Iterator[Any] = iter(())

    def __call__(self) -> Any:
        started = time.perf_counter()
        loaded = self._next()
        if loaded is None:  # the first, or a loader whose data end
            self.batches = iter(self.loader)
            loaded = self._next()
        if loaded is None:
            raise DataError(ItemFault(item="the data", message="there is not one whole batch"))
        batch = self.take(loaded)
        self.waits.append(time.perf_counter() - started)
        return batch

    def _next(self) -> Any:
        """The next batch, None at the end. Raises DataError for whatever a loader raises; memory
        is another matter."""
        try:
            return next(self.batches, None)
        except MemoryError:
            raise
        except Exception as error:
            raise DataError(fault_of(error)) from error

    def close(self) -> None:
        """Ends the loader's workers, if it has any."""
        self.batches = iter(())
        self.loader = ()


def named(inner: Dataset[Any]) -> Dataset[Any]:
    """A data set that names the item that fails. A stream has no indices, and stays as it is."""
    return inner if isinstance(inner, IterableDataset) else Named(inner)


class Named(Dataset[Any]):
    """A data set whose failures say of which index they are, where it does not say better."""

    def __init__(self, inner: Dataset[Any]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        try:
            return self.inner[index]
        except BadItemError:
            raise
        except Exception as error:
            raise BadItemError(f"index {index}: {type(error).__name__}: {error}") from error


def fault_of(error: Exception) -> ItemFault:
    """What a loader raised, as the fault of an item where it names one. Of an error in a worker
    process torch keeps the traceback as text, whose last line is the error."""
    last = next((t for t in reversed(str(error).splitlines()) if t.strip()), type(error).__name__)
    kind, _, told = last.partition("BadItemError: ")
    item, _, message = (told or kind).partition(": ")
    if isinstance(error, BadItemError) and message:
        return ItemFault(item=item, message=message)
    return ItemFault(item="the loader", message=last.strip())


def taker(request: FedRequest, training: WatchedTraining) -> Callable[[Any], Any]:
    """From a batch as it was loaded, on the host, to what the task's loss takes, on the device."""
    task, setting, device = training.task, request.setting, training.device
    if isinstance(task, GivenTask):
        return lambda loaded: prepare(loaded, setting, device)
    assert isinstance(task, Classification)
    checked: list[bool] = []

    def take(loaded: Any) -> tuple[Tensor, Tensor]:
        images, labels = images_and_labels(loaded)
        if not checked:
            check_images(images, labels, task)
            checked.append(True)
        return task.loaded(images, labels, device)

    return take


def images_and_labels(loaded: Any) -> tuple[Tensor, Tensor]:
    """The two tensors of a batch: a pair, or an image processor's mapping. Raises DataError."""
    values = list(loaded.values()) if isinstance(loaded, Mapping) else loaded
    if isinstance(loaded, Mapping) and {"pixel_values", "labels"} <= set(loaded):
        values = [loaded["pixel_values"], loaded["labels"]]
    if isinstance(values, list | tuple) and len(values) == 2:
        images, labels = values
        if isinstance(images, Tensor) and isinstance(labels, Tensor):
            return images, labels
    law = f"a batch is {describe(loaded)}, and the model takes images and labels"
    raise DataError(ItemFault(item="the data", message=law))


def check_images(images: Tensor, labels: Tensor, task: Classification) -> None:
    """Raises DataError for images or labels that the model does not take."""
    if tuple(images.shape[1:]) != task.shape:
        law = f"images are {list(images.shape[1:])}, and the model takes {list(task.shape)}"
        raise DataError(ItemFault(item="the data", message=law))
    if labels.dim() == 1 and labels.numel() and int(labels.max()) >= task.num_classes:
        law = f"a label is {int(labels.max())}, and the model has {task.num_classes} classes"
        raise DataError(ItemFault(item="the data", message=law))
