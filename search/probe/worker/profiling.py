"""Some steps under torch's profiler: the trace, and the caching allocator's snapshot on CUDA."""

from __future__ import annotations

import gzip
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from planner.core.errors import PlannerError
from planner.core.units import format_bytes
from planner.training.step import Training
from search.probe.protocol import PROFILE_MARK, SNAPSHOT_FILE, TRACE_FILE, ProfileOrder
from search.probe.worker.history import record_history
from search.probe.worker.meter import Meter
from search.probe.worker.phases import StepPhases

_WAIT, _WARM_UP = 1, 1  # steps before those that are kept: the first ones start the profiler


class _Marks:
    """Marks the phases of each step in the trace, one after another without a gap."""

    def __init__(self, phases: StepPhases) -> None:
        self.phases = phases
        self.open: record_function | None = None

    def enter(self, phase: str) -> None:
        self.leave()
        self.open = record_function(PROFILE_MARK + phase)
        self.open.__enter__()

    def leave(self) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None

    def __call__(self, ended: str) -> None:
        self.phases(ended)
        if ended == "zero_grad":
            self.leave()
        else:
            self.enter(self.phases.current)


def profile_steps(
    training: Training, meter: Meter, phases: StepPhases, order: ProfileOrder
) -> None:
    """Runs `order.steps` marked steps and writes the trace of them into the folder.

    The device is waited for before the first and after the last, and not between: the host runs
    ahead as it does in training. Raises PlannerError where a file cannot be written.
    """
    folder = Path(order.folder)
    activities = [ProfilerActivity.CPU]
    if training.device_type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    marks = _Marks(phases)
    before = _WAIT + _WARM_UP
    with profile(
        activities=activities,
        schedule=schedule(wait=_WAIT, warmup=_WARM_UP, active=order.steps, repeat=1),
        acc_events=False,
    ) as profiler:
        for step in range(before + order.steps):
            marks.enter("forward")
            training.step(marks)
            if step == before - 1:
                meter.synchronize()
            elif step == before + order.steps - 1:
                marks.enter("wait")
                meter.synchronize()
                marks.leave()
            profiler.step()
    with _writing(folder / TRACE_FILE):
        _export(profiler, folder / TRACE_FILE)
    if training.device_type == "cuda":
        snapshot = record_history(training.device, training.step, stacks="python")
        with _writing(folder / SNAPSHOT_FILE), (folder / SNAPSHOT_FILE).open("wb") as file:
            pickle.dump(snapshot, file, protocol=4)


def _export(profiler: profile, file: Path) -> None:
    """Beside it first, plain: torch itself would compress by way of the machine's own folder for
    temporary files, and says nothing of a disk that is full."""
    plain = file.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    if not plain.exists():
        free = shutil.disk_usage(file.parent).free
        raise PlannerError(
            f"{file.name} cannot be written: the profiler left no trace, and {format_bytes(free)} "
            "are free there. Free some, or name another folder with --output."
        )
    with plain.open("rb") as source, gzip.open(file, "wb", compresslevel=6) as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PlannerError(f"{file.name} cannot be written: {error.strerror}.") from None
