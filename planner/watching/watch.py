"""`planner.watch`: one small hook for a running training.

It reads the host's clock and counters, never waits for the device, and never ends a training by a
fault of its own: its first fault is one warning, and then it is silent.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from planner.watching.analysis import judge
from planner.watching.counters import Count
from planner.watching.expectation import Expectation, read_expectation
from planner.watching.loaders import Timed, time_in_place
from planner.watching.log import LOG_FORMAT, LogFile, log_path
from planner.watching.process import folder_of, rank_and_size, versions
from planner.watching.scalars import write_scalars

if TYPE_CHECKING:
    from planner.watching.device import Device, Scalar
    from planner.watching.sampler import Sampler

INTERVAL_SECONDS = 30.0
WARM_UP_STEPS = 5  # the first of them compile, tune kernels and fill caches
MAX_FAULTS = 10  # then it stands aside
MAX_EVENTS = 20  # of one kind
_logger = logging.getLogger("planner.watch")

P = ParamSpec("P")
R = TypeVar("R")


def guarded(
    method: Callable[Concatenate[Watch, P], R],
) -> Callable[Concatenate[Watch, P], R | None]:
    """A method that raises nothing: a training does not end because it is watched."""

    @functools.wraps(method)
    def call(self: Watch, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self._is_off:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._fail(error)
            return None

    return call


class Watch:
    """Watch a training: `with planner.watch("run") as watch:`, and `watch.step(images)` after each
    optimizer step. It is held against its plan, and told of in `watch.jsonl`.

    `plan` is what it is held against: a folder of `planner tune` or its `recommendation.json`, an
    Estimate, the file of `planner estimate --json`, or None. `folder` is where `watch.jsonl` goes:
    the plan's own, or else the current one. `history` is how many events of the allocator are kept
    with their stacks for a snapshot at an out-of-memory error; 0 keeps none, and the snapshot then
    says sizes only. `writer` is a TensorBoard writer that the loop already has. `device` is
    "cuda:N" or "cpu": the current one, where None. Where a loader is watched (`batches`, `time`),
    the images and the waits are its own. Each rank writes a file of its own. Raises nothing.
    """

    def __init__(
        self,
        plan: object = None,
        folder: str | PathLike[str] | None = None,
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        history: int = 0,
        writer: Any = None,
        device: str | None = None,
    ) -> None:
        self._is_off = False
        self._process = os.getpid()
        self._faults: list[str] = []
        self._told = 0
        self._plan = plan
        self._folder = Path()
        with suppress(Exception):
            self._folder = folder_of(plan, folder)
        self._interval_seconds = interval_seconds
        self._history = history
        self._writer = writer
        self._wanted = device
        self._is_open = self._is_timed = self._is_observed = False
        self._log: LogFile | None = None
        self._device: Device | None = None
        self._sampler: Sampler | None = None
        self._expected: Expectation | None = None
        self._device_name = ""
        self._forget()

    def _forget(self) -> None:
        """Nothing was counted yet: a trainer may begin again."""
        self._now, self._warm, self._steady = Count(), Count(), Count()
        self._pending_images = self._pending_micro = 0
        self._num_steps = 0
        self._began = self._since = time.perf_counter()
        self._due = float("inf")  # by steps, until it is warm
        self._ended: float | None = None
        self._ended_by: str | None = None
        self._before: dict[str, Any] = {}
        self._true_now: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._peaks: dict[str, Any] = {}
        self._num_snapshots = 0
        self._said_loss: float | None = None
        self._loss: Scalar | None = None
        self._scale: Scalar | None = None

    # ------------------------------------------------------------- the loop

    def __enter__(self) -> Watch:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)

    @guarded
    def open(self) -> None:
        """Begin, if it has not begun: `with` does, and so does the first step."""
        if self._is_open or self._process != os.getpid():
            return
        self._forget()
        self._is_open = True
        atexit.register(self._at_exit)
        rank, world = rank_and_size()
        self._log = LogFile(log_path(self._folder, rank))
        self._begin(rank, world)

    @guarded
    def step(self, images: int | None = None, loss: Any = None, scaler: Any = None) -> None:
        """One optimizer step is done, over `images` of this device (those that a watched loader
        gave, where None). `loss` (a number or a tensor) and `scaler` (a GradScaler) are looked at
        once an interval, and not held."""
        if not self._is_open:
            self.open()
        count = self._now
        count.steps += 1
        count.micro_steps += self._pending_micro or 1
        count.images += self._pending_images if images is None else images
        self._pending_images = self._pending_micro = 0
        self._num_steps += 1
        now = time.perf_counter()
        if now >= self._due or self._num_steps == WARM_UP_STEPS:
            self._close_interval(now, loss, scaler)

    @guarded
    def micro_step(self, images: int = 0) -> None:
        """One micro-batch of an optimizer step is done, where gradients are accumulated."""
        self._pending_micro += 1
        self._pending_images += images

    def batches(self, loader: Iterable[Any]) -> Any:
        """`loader`, timed: what the loop waits for it, and how many images it gives."""
        if self._is_off:
            return loader
        self._is_timed = True
        return Timed(loader, self._on_batch, self._on_pass_ended)

    def time(self, loader: Any) -> Any:
        """The same object, timed in place: for trainers that want a DataLoader to be one."""
        self._time(loader)
        return loader

    @guarded
    def follow(self, optimizer: Any) -> None:
        """Count `optimizer`'s steps, in place of calls of `step`. An optimizer of accelerate's
        stands for the one it holds. A step that a scaler skips is no step."""
        inner = getattr(optimizer, "optimizer", optimizer)
        inner.register_step_post_hook(lambda *_: self.step())

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What is done here is no training: validation, checkpoints."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.skip(time.perf_counter() - began)

    @guarded
    def skip(self, seconds: float) -> None:
        """So many of the last seconds were no training."""
        self._now.paused_seconds += seconds

    @guarded
    def see_number(self, name: str, value: float) -> None:
        """A loss or a norm of gradients that a trainer has on the host by itself."""
        if name == "loss":
            self._said_loss = value
        if not abs(value) < float("inf"):
            self._event(f"non-finite {name}", f"The {name} is {value}.", **{name: value})

    @guarded
    def see_error(self, error: BaseException) -> None:
        """An error ended the training, and is raised elsewhere."""
        from planner.watching.out_of_memory import is_out_of_memory

        self._ended_by = type(error).__name__
        if not is_out_of_memory(error):
            return
        text = str(error)
        is_of_cuda = "CUDA out of memory" in text or "HIP out of memory" in text
        if not (self._counts["out of memory"] and is_of_cuda):
            self._on_out_of_memory({"error": type(error).__name__, "text": text[:1500]})

    @guarded
    def close(self, error: BaseException | None = None) -> None:
        """The last line, once; without `with` this is called at the end of the process."""
        if not self._is_open or self._process != os.getpid():
            return
        if error is not None:
            self.see_error(error)
        self._is_open = False
        with suppress(Exception):
            atexit.unregister(self._at_exit)
        if self._sampler is not None:
            self._sampler.stop()
        self._finish()

    # ------------------------------------------------------------- what trainers call back

    @guarded
    def _on_batch(self, seconds: float, images: int) -> None:
        if self._ended is not None:  # since the last pass over the data ended: no training
            self._now.paused_seconds += max(time.perf_counter() - seconds - self._ended, 0.0)
            self._ended = None
        self._now.wait_seconds += seconds
        if images:
            self._pending_images += images
            self._pending_micro += 1

    @guarded
    def _on_pass_ended(self) -> None:
        self._ended = time.perf_counter()

    @guarded
    def _time(self, loader: Any) -> None:
        time_in_place(loader, self._on_batch, self._on_pass_ended)
        self._is_timed = True

    def _at_exit(self) -> None:
        # What Python printed last is the error that ended the process.
        self.close(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    # ------------------------------------------------------------- lines

    def _begin(self, rank: int, world: int) -> None:
        from planner.watching.device import find_device, find_driver_device
        from planner.watching.sampler import Sampler

        with self._survive("the plan cannot be read"):
            self._expected = read_expectation(self._plan)
        with self._survive("the device cannot be asked"):
            self._device = find_device(self._wanted)
        described = self._device.describe() if self._device else {}
        self._device_name = described.get("name", "")
        with self._survive("the allocator's history cannot be recorded"):
            self._watch_memory()
        if self._device is not None and self._device.index is not None:
            device = self._device
            self._sampler = Sampler(lambda: find_driver_device(device))
            self._sampler.start()
        self._write({
            "kind": "start",
            "format": LOG_FORMAT,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rank": rank,
            "world_size": world,
            "process": self._process,
            "device": described,
            "versions": versions(),
            "plan": self._expected.to_json() if self._expected else None,
            "interval_seconds": self._interval_seconds,
        })  # fmt: skip

    def _watch_memory(self) -> None:
        """Attach the observer as soon as CUDA is in use; the loop may begin before that."""
        from planner.watching.out_of_memory import observe, record_history

        if self._device is None or self._device.index is None or self._is_observed:
            return
        self._is_observed = observe(self._on_out_of_memory)
        if self._is_observed and self._history:
            record_history(self._history)

    def _close_interval(self, now: float, loss: Any = None, scaler: Any = None) -> None:
        count, self._now = self._now, Count()
        count.seconds, self._since = now - self._since, now
        self._due = now + self._interval_seconds
        is_warm_up = self._num_steps <= WARM_UP_STEPS
        (self._warm if is_warm_up else self._steady).add(count)
        self._watch_memory()
        line = {
            "kind": "interval",
            "seconds": now - self._began,
            "step": self._num_steps,
            **count.to_json(self._is_timed),
            **(self._device.memory() if self._device else {}),
            **self._read_scalars(loss, scaler),
            "clocks": self._sampler.take() if self._sampler else None,
            "warm_up": True if is_warm_up else None,
        }
        self._remember(line)
        self._write(line)
        seen = {
            event.name: event
            for event in judge(line, self._before, self._expected, self._device_name)
        }
        for name, event in seen.items():
            if name not in self._true_now:
                self._event(name, event.message, **event.figures)
        self._true_now = set(seen)
        self._before = {**self._before, **{k: v for k, v in line.items() if v is not None}}
        write_scalars(self._writer, line, self._expected, self._num_steps)

    def _read_scalars(self, loss: Any, scaler: Any) -> dict[str, Any]:
        if loss is None and scaler is None:
            return {"loss": self._said_loss}
        from planner.watching.device import Scalar

        if self._loss is None or self._scale is None:
            self._loss, self._scale = Scalar(), Scalar()
        scale = getattr(scaler, "_scale", None) if scaler is not None else None
        return {"loss": self._loss.read(loss), "scale": self._scale.read(scale)}

    def _remember(self, line: dict[str, Any]) -> None:
        """The peaks of the whole run, for its last line."""
        for key in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes"):
            if line.get(key) is not None:
                self._peaks[key] = max(self._peaks.get(key, 0), line[key])
        for key in ("alloc_retries", "ooms"):
            if line.get(key):
                self._peaks[key] = line[key]

    def _event(self, name: str, message: str, **figures: Any) -> None:
        self._counts[name] += 1
        if self._counts[name] <= MAX_EVENTS:
            seconds = time.perf_counter() - self._began
            self._write({
                "kind": "event", "event": name, "seconds": seconds, "step": self._num_steps,
                "message": message, **figures,
            })  # fmt: skip

    @guarded
    def _on_out_of_memory(self, figures: dict[str, Any]) -> None:
        """Of torch's allocator, before it raises; or of an error that has arrived."""
        from planner.watching.out_of_memory import MAX_SNAPSHOTS, save_snapshot

        snapshot = None
        if self._num_snapshots < MAX_SNAPSHOTS and self._device and self._device.index is not None:
            name = f"oom_rank{rank_and_size()[0]}_{os.getpid()}_{self._num_snapshots}.pickle"
            with self._survive("no snapshot was written"):
                snapshot = save_snapshot(self._folder / name)
                self._num_snapshots += 1
        memory = self._device.memory() if self._device else {}
        self._event(
            "out of memory",
            "There was no memory for a request."
            + (f" 'planner explain {snapshot}' says what was alive." if snapshot else ""),
            **figures, **memory, snapshot=str(snapshot) if snapshot else None,
        )  # fmt: skip

    def _finish(self) -> None:
        now = time.perf_counter()
        is_warm = self._num_steps > WARM_UP_STEPS
        if is_warm and not self._steady.steps and self._now.steps >= WARM_UP_STEPS:
            self._close_interval(now)  # all that a short run can be judged by
        elif self._now.steps:
            self._now.seconds = now - self._since
            (self._steady if is_warm else self._warm).add(self._now)
        if self._device is not None:
            self._remember(self._device.memory())
        counted = self._steady if self._steady.steps else self._warm
        self._write({
            "kind": "end",
            "seconds": now - self._began,
            "status": self._ended_by or "finished",
            "step": self._num_steps,
            "steady": counted.to_json(self._is_timed),
            **self._peaks,
            "events": dict(self._counts),
            "faults": self._faults or None,
        })  # fmt: skip
        if self._log is not None:
            self._log.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._log is None or self._process != os.getpid():
            return
        with self._survive(f"{self._log.path} cannot be written"):
            self._log.write(line)

    # ------------------------------------------------------------- faults of its own

    @contextmanager
    def _survive(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._tell(what, error)

    def _fail(self, error: Exception) -> None:
        with suppress(Exception):
            self._told += 1
            self._is_off = self._told >= MAX_FAULTS
            self._tell("a hook failed", error)

    def _tell(self, what: str, error: Exception) -> None:
        """One warning in all, and each kind of fault once in the last line."""
        said = f"{what}: {type(error).__name__}: {error}"[:300]
        if not self._faults:
            _logger.warning("planner.watch: %s. The training goes on.", said)
        if said not in self._faults and len(self._faults) < MAX_FAULTS:
            self._faults.append(said)

    # ------------------------------------------------------------- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return _inert()

    def __reduce__(self) -> tuple[Callable[[], Watch], tuple[()]]:
        return _inert, ()


def _inert() -> Watch:
    """What a copy is, in this process or another: it does nothing, and the file has one writer."""
    copy = Watch()
    copy._is_off = True
    return copy


watch = Watch  # `planner.watch`
