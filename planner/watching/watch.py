"""`planner.watch`: one small hook for a running training.

    with planner.watch("run") as watch:
        for images, targets in watch.batches(loader):
            ...
            watch.step(loss=loss, scaler=scaler)

It reads the host's clock and counters and never waits for the device. A fault of its own is one
warning: the training goes on. What it sees goes to `watch.jsonl` as JSON lines of four kinds:
`start`, `interval` (the plan beside the measured), `event` and `end`; a file may hold several runs.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

from planner.core.units import KIB, MIB
from planner.watching.analysis import judge
from planner.watching.expectation import Expectation, read_expectation

INTERVAL_SECONDS = 30.0
WARM_UP_STEPS = 5  # the first of them compile, tune kernels and fill caches
MAX_EVENTS = 20  # of one kind
LOG_FORMAT = 1
# A line of an interval is some 500 bytes: at one each 30 s that is five days.
MAX_LOG_BYTES = 8 * MIB
_logger = logging.getLogger("planner.watch")


@dataclass
class _Count:
    """Sums over a span of training; `paused` seconds are validation and checkpoints."""

    steps: int = 0
    micro_steps: int = 0
    images: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    paused: float = 0.0

    def add(self, other: _Count) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def figures(self, is_timed: bool) -> dict[str, Any]:
        trained = self.seconds - self.paused
        known = trained > 0
        return {
            "steps": self.steps, "micro_steps": self.micro_steps, "images": self.images or None,
            "images_per_second": self.images / trained if self.images and known else None,
            "step_seconds": trained / self.steps if self.steps else None,
            "wait_share": min(self.waited / trained, 1.0) if is_timed and known else None,
            "paused_seconds": self.paused or None,
        }  # fmt: skip


class Watch:
    """Watches a training: `step` after each optimizer step, `batches` around its loader.

    `plan` is what it is held against: a folder of `planner tune` or its `recommendation.json`, an
    Estimate, the file of `planner estimate --json`, or None. `watch.jsonl` goes to `folder`: the
    plan's own, or else the current one; each rank of a world has a file of its own. An interval is
    closed after `interval_seconds`. `history` is how many events of CUDA's allocator are kept with
    their stacks, for the snapshot that is written where memory runs out; 0 keeps none. `device` is
    "cuda:N" or "cpu": the current one, where None. Raises nothing.
    """

    def __init__(
        self, plan: object = None, folder: str | PathLike[str] | None = None, *,
        interval_seconds: float = INTERVAL_SECONDS, history: int = 0, device: str | None = None,
    ) -> None:  # fmt: skip
        self._plan, self._wanted, self._history = plan, device, history
        self._interval_seconds = interval_seconds
        self._process, self._rank = os.getpid(), 0
        self._is_open = self._is_off = self._is_timed = False
        self._faults: list[str] = []
        self._folder = Path()
        with self._survive("the folder"):
            self._folder = Path(folder) if folder is not None else _folder_of(plan)

    def __enter__(self) -> Watch:
        self.open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def open(self) -> None:
        """Begins; `with` and the first step do so too."""
        if self._is_open or self._is_off or self._process != os.getpid():
            return
        self._is_open = True
        self._now, self._warm, self._steady, self._pending = (_Count() for _ in range(4))
        self._num_steps, self._began = 0, time.perf_counter()
        self._since, self._passed = self._began, 0.0
        self._before: dict[str, Any] = {}
        self._peaks: dict[str, int] = {}
        self._told: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._loss, self._scale = _Scalar(), _Scalar()
        self._expected: Expectation | None = None
        self._index: int | None = None
        described: dict[str, Any] = {}
        with self._survive("the plan cannot be read"):
            self._expected = read_expectation(self._plan)
        with self._survive("the device cannot be asked"):
            self._rank, world = _rank_and_size()
            described = self._find_device()
        self._device_name = described.get("name", "")
        self._uuid = described.get("uuid")
        self._write({
            "kind": "start", "format": LOG_FORMAT, "rank": self._rank, "world_size": world,
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "process": self._process,
            "device": described, "versions": _versions(),
            "plan": self._expected.as_json() if self._expected else None,
            "interval_seconds": self._interval_seconds,
        })  # fmt: skip
        atexit.register(self._at_exit)

    def step(self, images: int | None = None, loss: Any = None, scaler: Any = None) -> None:
        """One optimizer step is done, over `images` of this device (those that a watched loader
        gave, where None). `loss` (a number or a tensor) and `scaler` (a GradScaler) are looked at
        once an interval, and not held."""
        self.open()
        if not self._is_open or self._process != os.getpid():
            return
        self._pending.steps = 1
        self._pending.micro_steps = self._pending.micro_steps or 1
        if images is not None:
            self._pending.images = images
        self._now.add(self._pending)
        self._pending = _Count()
        self._num_steps += 1
        now = time.perf_counter()
        due = self._num_steps > WARM_UP_STEPS and now >= self._since + self._interval_seconds
        if due or self._num_steps == WARM_UP_STEPS:
            with self._survive("an interval cannot be closed"):
                self._close_interval(now, loss, scaler)

    def batches(self, loader: Iterable[Any]) -> Any:
        """`loader`, timed: what the loop waits for it, and how many images it gives."""
        return loader if self._is_off else _Timed(loader, self)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What is done here is no training: validation, checkpoints."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.skip(time.perf_counter() - began)

    def skip(self, seconds: float) -> None:
        """So many of the last seconds were no training."""
        if self._is_open:
            self._now.paused += seconds

    def close(self, error: BaseException | None = None) -> None:
        """The last line, once; without `with` this is called at the end of the process."""
        if not self._is_open or self._process != os.getpid():
            return
        with suppress(Exception):
            atexit.unregister(self._at_exit)
        with self._survive("the end"):
            self._on_error(error)
            self._finish(error)
        self._is_open = False

    def _at_exit(self) -> None:
        # What Python printed last is the error that ended the process.
        self.close(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    # ---- what is measured

    def _find_device(self) -> dict[str, Any]:
        import torch

        wanted = self._wanted or "cuda"
        if not wanted.startswith("cuda") or not torch.cuda.is_available():
            from planner.machine.hardware.gpu import cpu_name

            return {"kind": "cpu", "name": cpu_name()}
        index = torch.device(wanted).index
        self._index = torch.cuda.current_device() if index is None else index
        if self._history:
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=self._history
            )
        found = torch.cuda.get_device_properties(self._index)
        uuid = str(getattr(found, "uuid", "")) or None
        return {"kind": "cuda", "name": found.name, "index": self._index,
                "total_bytes": found.total_memory, "uuid": uuid}  # fmt: skip

    def _memory(self) -> dict[str, Any]:
        if self._index is None:
            import resource  # which Windows lacks, where a log is still explained

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return {"peak_resident_bytes": peak if sys.platform == "darwin" else peak * KIB}
        import torch

        stats = torch.cuda.memory_stats(self._index)
        return {
            "allocated_bytes": stats.get("allocated_bytes.all.current"),
            "peak_allocated_bytes": stats.get("allocated_bytes.all.peak"),
            "reserved_bytes": stats.get("reserved_bytes.all.current"),
            "peak_reserved_bytes": stats.get("reserved_bytes.all.peak"),
            "alloc_retries": stats.get("num_alloc_retries", 0), "ooms": stats.get("num_ooms", 0),
        }  # fmt: skip

    def _clocks(self) -> dict[str, Any] | None:
        """What the driver says of the device now; None on the CPU."""
        if self._uuid is None:
            return None
        from planner.machine import nvml
        from planner.machine.hardware.gpu import DISTURBING_REASONS

        bare = self._uuid.casefold().removeprefix("gpu-")
        for found in nvml.devices():
            if found and (found.uuid or "").casefold().removeprefix("gpu-") == bare:
                busy, reasons = found.utilization, found.throttle_reasons
                return {
                    "busy_percent": busy.gpu_percent if busy else None, "sm_mhz": found.sm_mhz,
                    "temperature_c": found.temperature_c, "power_watts": found.power_watts,
                    "slowed_by": sorted(set(reasons) & DISTURBING_REASONS.keys()) or None,
                }  # fmt: skip
        return None

    # ---- lines

    def _close_interval(self, now: float, loss: Any = None, scaler: Any = None) -> None:
        count, self._now = self._now, _Count()
        count.seconds, self._since = now - self._since, now
        is_warm_up = self._num_steps <= WARM_UP_STEPS
        (self._warm if is_warm_up else self._steady).add(count)
        line = {
            "kind": "interval", "seconds": now - self._began, "step": self._num_steps,
            **count.figures(self._is_timed), **self._memory(), "loss": self._loss.read(loss),
            "scale": self._scale.read(getattr(scaler, "_scale", None)), "clocks": self._clocks(),
            "planned": self._expected.figures() if self._expected else None,
            "warm_up": True if is_warm_up else None,
        }  # fmt: skip
        self._remember(line)
        self._write(line)
        seen = {e.name: e for e in judge(line, self._before, self._expected, self._device_name)}
        for name, event in seen.items():
            if name not in self._told:
                self._event(name, event.message, **event.figures)
        self._told = set(seen)
        self._before |= {key: value for key, value in line.items() if value is not None}

    def _remember(self, line: dict[str, Any]) -> None:
        """The peaks of the whole run, for its last line."""
        for key, value in line.items():
            if value and (key.startswith("peak_") or key in ("alloc_retries", "ooms")):
                self._peaks[key] = max(self._peaks.get(key, 0), value)

    def _event(self, name: str, message: str, **figures: Any) -> None:
        self._counts[name] += 1
        if self._counts[name] <= MAX_EVENTS:
            seconds = time.perf_counter() - self._began
            self._write({
                "kind": "event", "event": name, "seconds": seconds, "step": self._num_steps,
                "message": message, **figures,
            })  # fmt: skip

    def _on_error(self, error: BaseException | None) -> None:
        """Where memory ran out: an event, and a snapshot while what its frames hold is alive."""
        from planner.core.failures import is_allocation_failure

        is_memory = isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and is_allocation_failure(str(error))
        )
        if not is_memory:
            return
        snapshot, said = None, "There was no memory for a request."
        if self._index is not None:
            import torch

            snapshot = str(self._folder / f"oom_rank{self._rank}_{self._process}.pickle")
            torch.cuda.memory._dump_snapshot(snapshot)
            said += f" 'planner explain {snapshot}' says what was alive."
        self._event(
            "out of memory", said, error=type(error).__name__, text=str(error)[:1500],
            snapshot=snapshot, **self._memory(),
        )  # fmt: skip

    def _finish(self, error: BaseException | None) -> None:
        now = time.perf_counter()
        if self._num_steps > WARM_UP_STEPS and not self._steady.steps:
            self._close_interval(now)  # all that a short run can be judged by
        elif self._now.steps:
            self._now.seconds = now - self._since
            (self._steady if self._num_steps > WARM_UP_STEPS else self._warm).add(self._now)
        self._remember(self._memory())
        counted = self._steady if self._steady.steps else self._warm
        self._write({
            "kind": "end", "seconds": now - self._began, "step": self._num_steps,
            "status": type(error).__name__ if error is not None else "finished",
            "steady": counted.figures(self._is_timed), **self._peaks,
            "events": dict(self._counts), "faults": self._faults or None,
        })  # fmt: skip

    def _write(self, line: dict[str, Any]) -> None:
        """Appends a line, whole; a full file takes events and the end only for a while longer."""
        name = f"watch.rank{self._rank}.jsonl" if self._rank else "watch.jsonl"
        path = self._folder / name
        with self._survive(f"{path} cannot be written"):
            self._folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o666)
            try:
                size = os.fstat(descriptor).st_size
                text = json.dumps(_plain(line), separators=(",", ":"), default=str)
                left = {"interval": MAX_LOG_BYTES // 8, "event": MAX_LOG_BYTES // 16}
                if size + len(text) > MAX_LOG_BYTES - left.get(line["kind"], 0):
                    return
                torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
                os.write(descriptor, f"{chr(10) if torn else ''}{text}\n".encode())
            finally:
                os.close(descriptor)

    @contextmanager
    def _survive(self, what: str) -> Iterator[None]:
        """One warning in all; each kind of fault once in the last line."""
        try:
            yield
        except Exception as error:
            said = f"{what}: {type(error).__name__}: {error}"[:300]
            if not self._faults:
                _logger.warning("planner.watch: %s. The training goes on.", said)
            if said not in self._faults and len(self._faults) < MAX_EVENTS:
                self._faults.append(said)

    def __reduce__(self) -> tuple[Callable[[], Watch], tuple[()]]:
        return _inert, ()  # a copy does nothing: the file has one writer


def _inert() -> Watch:
    copy = Watch()
    copy._is_off = True
    return copy


class _Timed:
    """A loader whose batches are timed and counted; all else that is asked of it is its own."""

    def __init__(self, loader: Iterable[Any], watch: Watch) -> None:
        self._loader, self._watch = loader, watch

    def __iter__(self) -> Iterator[Any]:
        watch = self._watch
        watch.open()
        watch._is_timed = True
        if watch._is_open and watch._passed:  # since the last pass ended nothing was trained
            watch.skip(time.perf_counter() - watch._passed)
        began = time.perf_counter()
        for batch in self._loader:
            if watch._is_open:
                watch._now.waited += time.perf_counter() - began
                watch._pending.micro_steps += 1
                watch._pending.images += _count_images(batch)
            yield batch
            began = time.perf_counter()
        if watch._is_open:
            watch._passed = time.perf_counter()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Scalar:
    """A number that a training computes on its device, read without waiting for it: a GPU's is
    copied to pinned memory behind what is queued, and is the newest that has arrived."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._pending: tuple[Any, Any] | None = None

    def read(self, number: Any) -> float | None:
        if self._pending is not None and self._pending[1].query():
            self.value, self._pending = float(self._pending[0]), None
        if getattr(getattr(number, "device", None), "type", "cpu") != "cpu":
            if self._pending is None and number.numel() == 1:
                import torch

                with torch.no_grad(), torch.cuda.device(number.device):
                    room = torch.empty((), dtype=torch.float32, pin_memory=True)
                    room.copy_(number.detach().reshape(()), non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
                self._pending = room, event
        elif number is not None:
            self.value = float(number.detach() if hasattr(number, "detach") else number)
        return self.value


def _count_images(batch: Any) -> int:
    """Of the first tensor that is found in it; 0 where there is none."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((n for part in batch[:8] if (n := _count_images(part))), 0)
    shape = getattr(batch, "shape", ())
    return int(shape[0]) if shape else 0


def _plain(value: Any) -> Any:
    """Strict JSON: infinities and NaN as text, figures with no more digits than they deserve."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def _folder_of(plan: object) -> Path:
    if isinstance(plan, str | PathLike):
        path = Path(plan)
        return path if path.is_dir() else path.parent
    return Path()


def _rank_and_size() -> tuple[int, int]:
    """By torch where a process group is there, else by the launcher's words."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


def _versions() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for package in ("planner", "torch", "timm", "transformers", "lightning", "accelerate"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


watch = Watch  # `planner.watch`
