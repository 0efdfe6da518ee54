"""`planner.watch`: a running training compared with its plan, in lines of its own log.

    with planner.watch("run") as watch:
        for images, targets in watch.batches(loader):
            ...
            watch.step()

    planner.watch: step 400: 612 images/s (plan: 640), 1% waiting for data, peak allocated …
    planner.watch: slower than planned: …

It reads the host's clock and torch's counters, and never waits for the device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from planner.core.units import format_bytes, format_rate

if TYPE_CHECKING:
    from planner.estimation.arguments import ResultLike

Batch = TypeVar("Batch")
EVERY_SECONDS = 60.0
WARM_UP_STEPS = 5  # the first of them compile, tune kernels and fill caches
# A larger difference is worth a line. Judgements: repeated probes of one setting differ by a few
# percent in time and by less than one in bytes.
MEMORY_SLACK, RATE_SLACK, WAIT_SHARE, BATCH_SLACK = 0.05, 0.10, 0.10, 0.02
KINDS = "allocated", "reserved"  # of the peaks of memory that torch counts


@dataclass(frozen=True)
class Planned:
    """What one device should do, by `basis` (predicted or measured): a step of so many `images`, at
    a `rate` in images per second, which may be less by the share `doubt`. `peaks` are the bytes
    allocated and reserved, where they are known; `gpu` is None for a CPU."""

    basis: str
    gpu: str | None
    images: int
    rate: float | None
    doubt: float = 0.0
    peaks: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Seen:
    """What one device did in `seconds` of training, of which it waited for batches during `waited`.
    Validation and checkpoints took `paused` seconds, which are not among them."""

    steps: int = 0
    images: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    paused: float = 0.0
    gpu: str | None = None
    retries: int = 0
    peaks: Mapping[str, int] = field(default_factory=dict)


class Watch:
    """Watches a training: call `step` after each optimizer step, and put `batches` around the
    loader.

    It compares the training with `plan`: a folder of `planner tune` or its `recommendation.json`,
    the output of `planner estimate --json` or `advise --json`, an Estimate, an Advice, a
    Recommendation, or None. Raises UsageError for a plan that cannot be read. Rank 0 prints a line
    every `every_seconds`, and each rank one line for each kind of difference; `say` receives them
    (None: standard error). If memory runs out, a snapshot of torch's allocator goes to `folder`.
    """

    def __init__(
        self, plan: ResultLike | None = None, folder: str | PathLike[str] = ".", *,
        every_seconds: float = EVERY_SECONDS, say: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.planned = None if plan is None else read_plan(plan)
        self._folder, self._every_seconds, self._say = Path(folder), every_seconds, say or _print
        self._rank = int(os.environ.get("RANK") or 0)
        self._step = self._pending = self._retries = 0
        self._seen, self._since, self._reported = Seen(), perf_counter(), set[str]()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def step(self, images: int | None = None) -> None:
        """One optimizer step is done, over `images` of this device (None: what `batches` gave)."""
        self._step += 1
        self._seen.steps += 1
        self._seen.images += self._pending if images is None else images
        self._pending = 0
        if self._step == WARM_UP_STEPS:
            self._seen, self._since = Seen(), perf_counter()
            self._retries = _counters().get("num_alloc_retries", 0)
        elif self._step > WARM_UP_STEPS and perf_counter() - self._since >= self._every_seconds:
            self._report()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of `loader`; counts their images, and the seconds that each is waited for."""
        began = perf_counter()
        for batch in loader:
            self._seen.waited += perf_counter() - began
            self._pending += _count_images(batch)
            yield batch
            began = perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Whatever runs within is no training: validation, checkpoints."""
        began = perf_counter()
        try:
            yield
        finally:
            self.skip(perf_counter() - began)

    def skip(self, seconds: float) -> None:
        """Takes so many of the last seconds as no training."""
        self._seen.paused += seconds

    def callback(self, base: type) -> Any:
        """A callback for a trainer. `base` is the trainer's own class of callbacks:
        `transformers.TrainerCallback`, or `lightning.pytorch.Callback`."""
        watch = self

        class Watching(base):  # type: ignore[misc]
            steps = 0

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch.step(args.train_batch_size * args.gradient_accumulation_steps)

            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                watch._pending += _count_images(args[2])  # the batch
                if trainer.global_step > self.steps:
                    watch.step()
                    self.steps = trainer.global_step

        return Watching()

    def close(self, error: BaseException | None = None) -> None:
        """Prints the last line, and keeps a snapshot where `error` says that memory ran out."""
        if self._step > WARM_UP_STEPS and self._seen.steps:
            self._report()
        from planner.core.failures import is_allocation_failure

        if isinstance(error, RuntimeError) and is_allocation_failure(str(error)):
            import torch

            if torch.cuda.is_initialized():
                path = self._folder / f"oom_rank{self._rank}_{os.getpid()}.pickle"
                self._folder.mkdir(parents=True, exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(path))
                self._tell(f"memory ran out: 'planner explain {path}' says what was alive.")

    def _report(self) -> None:
        now, seen = perf_counter(), self._seen
        seen.seconds = now - self._since - seen.paused
        if stats := _counters():
            card = sys.modules["torch"].cuda.get_device_properties()
            seen.gpu = _name(card.name, card.total_memory)
            seen.peaks = {kind: stats[f"{kind}_bytes.all.peak"] for kind in KINDS}
            seen.retries = stats["num_alloc_retries"] - self._retries
            self._retries += seen.retries
        if self._rank == 0:
            self._tell(f"step {self._step}: {figures(seen, self.planned)}")
        for kind, message in differences(seen, self.planned).items():
            if kind not in self._reported:
                self._tell(f"{kind}: {message}")
                self._reported.add(kind)
        self._seen, self._since = Seen(), now

    def _tell(self, line: str) -> None:
        rank = f"[rank{self._rank}]: " if self._rank else ""
        self._say(f"{rank}planner.watch: {line}")


watch = Watch  # `planner.watch`


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _counters() -> Mapping[str, int]:
    """torch's counters of the GPU's memory; none before CUDA is initialised."""
    torch = sys.modules.get("torch")
    return torch.cuda.memory_stats() if torch is not None else {}


def _count_images(batch: Any) -> int:
    """The length of the first tensor in a batch; 0 where there is none."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((n for part in batch if (n := _count_images(part))), 0)
    shape = getattr(batch, "shape", ())
    return int(shape[0]) if shape else 0


def _name(device: str, total_bytes: int) -> str:
    """A card's name in the catalogue, or its own."""
    from planner.machine.hardware import recognise_gpu

    known = recognise_gpu(device, total_bytes)
    return known.name if known else device


def figures(seen: Seen, planned: Planned | None) -> str:
    """`612 images/s (plan: 640), peak allocated 10.21 GiB (plan: 10.10 GiB)`."""
    plan = f" (plan: {format_rate(planned.rate)})" if planned and planned.rate else ""
    parts = [f"{format_rate(seen.images / seen.seconds)} images/s{plan}"]
    if seen.waited:
        parts.append(f"{seen.waited / seen.seconds:.0%} waiting for data")
    for kind, peak in seen.peaks.items():
        planned_peak = planned.peaks.get(kind) if planned else None
        plan = f" (plan: {format_bytes(planned_peak)})" if planned_peak else ""
        parts.append(f"peak {kind} {format_bytes(peak)}{plan}")
    return ", ".join(parts)


def differences(seen: Seen, planned: Planned | None) -> dict[str, str]:
    """What differs from the plan, and what costs time in any training: a sentence for each kind."""
    kinds = {}
    if seen.retries:
        kinds["allocator retries"] = (
            f"allocations that succeeded only after cached memory was given back: {seen.retries}. "
            "The device is full, and each retry waits for it."
        )
    if (share := seen.waited / seen.seconds) > WAIT_SHARE:
        kinds["waiting for data"] = f"{share:.0%} of the time was spent waiting for batches."
    if planned is None:
        return kinds
    images, rate, expected = seen.images / seen.steps, seen.images / seen.seconds, planned.rate
    if abs(images - planned.images) > BATCH_SLACK * planned.images:
        kinds["other batch"] = (
            f"a step has {images:.4g} images on this device, and the plan's has {planned.images}: "
            "memory and rates differ for that reason too."
        )
    for kind, size in planned.peaks.items():
        if (peak := seen.peaks.get(kind, 0)) > size * (1 + MEMORY_SLACK):
            kinds[f"more {kind} than planned"] = (
                f"{format_bytes(peak)} at the peak are {peak / size - 1:.0%} more than the plan's "
                f"{format_bytes(size)} ({planned.basis})."
            )
    if expected and seen.gpu != planned.gpu:
        here, there = seen.gpu or "a CPU", planned.gpu or "a CPU"
        kinds["other device"] = f"the plan is of {there}, this is {here}: rates are not compared."
    elif expected and rate < expected * (1 - max(RATE_SLACK, planned.doubt)):
        kinds["slower than planned"] = (
            f"{format_rate(rate)} images/s are {1 - rate / expected:.0%} less than the plan's "
            f"{format_rate(expected)} ({planned.basis})."
        )
    return kinds


def read_plan(plan: ResultLike) -> Planned:
    """What a plan expects of one device. Raises UsageError for what is no plan."""
    from planner.estimation.predicted import is_predicted, read_predicted
    from planner.trainers.emission import as_result, nothing_fitted, read_found

    data, source = read_found(plan, "plan")
    if is_predicted(data):
        predicted = read_predicted(data, source)
        name = predicted.gpu.name if predicted.gpu else predicted.figures.rates_of
        images = predicted.setting.images_per_device_step
        rate = predicted.figures.images_per_second
        doubt = predicted.figures.rate_uncertainty or 0.0
        peaks = _peaks(data[0] if isinstance(data, list) else data)
        return Planned("predicted", name, images, rate, doubt, peaks)
    result = as_result(data, source)
    evidence, setting, fed = result.evidence, result.setting, result.feeding
    if evidence is None or setting is None:
        raise nothing_fitted(source)
    rate = (fed.images_per_second if fed else None) or evidence.images_per_second
    images = setting.images_per_device_step
    if result.device.kind == "cpu":  # where a probe's bytes are of its whole process
        return Planned("measured", None, images, rate)
    name = _name(result.device.name, result.device.total_bytes)
    return Planned("measured", name, images, rate, peaks=_peaks(vars(evidence)))


def _peaks(figures: Mapping[str, Any]) -> dict[str, int]:
    sizes = {kind: figures.get(f"peak_{kind}_bytes") for kind in KINDS}
    return {kind: size for kind, size in sizes.items() if size and isinstance(size, int)}
