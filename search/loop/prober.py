"""Probes on a device, as a search makes them: the memory that they may take, the progress that they
report, and the signals that end them. The first signal ends the search and keeps what was measured;
a second Ctrl-C ends it at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from planner.core.errors import UsageError
from planner.core.schema import DeviceInfo, MeasurementRecord, Model
from planner.core.schema.record import noteworthy_bytes
from planner.core.units import format_bytes, format_seconds
from planner.report.searches import memory_text
from planner.report.text import describe_setting
from search.loop.options import SearchOptions
from search.loop.space import Candidate, Pick
from search.probe.device import MemoryInUse
from search.probe.parent import STEP_MODULES, ProbeServer, run_probe
from search.probe.protocol import FINALIST_SECONDS, ProbeRequest, ProgressMessage

# Of the time left: the steps of the first probe are timed for at most that.
FIRST_MEASURE_SHARE = 0.1


class Prober(Protocol):
    """Runs one probe to its end, whatever it is, within `deadline_seconds`."""

    def __call__(self, pick: Pick, probe_id: str, deadline_seconds: float) -> MeasurementRecord: ...


class DeviceProber:
    """Runs probes on a device, each in a worker process of its own.

    `described` is the device as the study has it. Its `memory_cap_bytes` emulates a smaller device;
    `cap_bytes` also keeps a probe on the CPU within the memory that is free. `on_result` receives
    what a worker measured before its process has ended.

    Workers are forked from one process that imports torch and the model's library. That begins when
    this context is entered, beside what the caller does before the first probe.
    """

    def __init__(
        self, model: Model, device: str, described: DeviceInfo, cap_bytes: int | None,
        on_progress: OnProgress, modules: Sequence[str] = STEP_MODULES,
    ) -> None:  # fmt: skip
        self.model, self.device, self.described = model, device, described
        self.cap_bytes, self.on_progress, self.modules = cap_bytes, on_progress, modules
        self.on_result: Callable[[MeasurementRecord], None] = lambda record: None

    def __enter__(self) -> DeviceProber:
        self.fork_server = ProbeServer(self.model, self.modules)
        return self

    def __exit__(self, *_: object) -> None:
        self.fork_server.close()

    def __call__(self, pick: Pick, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        request = ProbeRequest(
            probe_id=probe_id,
            model=self.model,
            setting=pick.candidate.setting,
            device=self.device,
            memory_cap_bytes=self.cap_bytes,
            give_up_images_per_second=pick.give_up_images_per_second,
            **self._timing(pick, deadline_seconds),
        )
        return run_probe(
            request,
            deadline_seconds=deadline_seconds,
            on_event=self._hear,
            device=self.described,
            on_result=self.on_result,
            fork_server=self.fork_server,
        )

    def _timing(self, pick: Pick, deadline_seconds: float) -> dict[str, float]:
        """Limits of timing: longer for a setting that is probed once more on a GPU, whose clocks
        drift; shorter for the first probe of a short budget, which leaves time for others."""
        if pick.stage == "calibrate":
            usual = ProbeRequest.model_fields["max_measure_seconds"].default
            return {"max_measure_seconds": min(usual, FIRST_MEASURE_SHARE * deadline_seconds)}
        if pick.stage == "finalists" and self.device != "cpu":
            return {"min_measure_seconds": FINALIST_SECONDS}
        return {}

    def _hear(self, event: ProgressMessage) -> None:
        self.on_progress(
            Progress(
                "step", phase=event.phase, num_steps=event.num_steps,
                step_seconds=event.step_seconds,
            )
        )  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """An event of a search. Its `kind` is note, start, step or end.

    `phase` is the search's stage, at a step the worker's phase. `probe` counts from 1, of
    `num_probes` (None: no limit). A start has the `deadline_seconds` after which the probe is given
    up, a step the `num_steps` that took `step_seconds` each, an end the `record`. `best` is the
    best so far."""

    kind: str
    text: str = ""
    phase: str = ""
    candidate: Candidate | None = None
    probe: int = 0
    num_probes: int | None = None
    best: MeasurementRecord | None = None
    seconds_left: float | None = None
    deadline_seconds: float | None = None
    num_steps: int = 0
    step_seconds: float | None = None
    record: MeasurementRecord | None = None


OnProgress = Callable[[Progress], None]


def note_taker(on_progress: OnProgress) -> Callable[[str], None]:
    """A function that reports a line of text as progress."""
    return lambda text: on_progress(Progress("note", text))


def progress_line(progress: Progress) -> str:
    """An event as a line: phase, probe n of N, the setting, what it found, the best so far, the
    time left. "" for a step, which has no line of its own."""
    if progress.kind == "note":
        return progress.text
    if progress.kind not in ("start", "end") or progress.candidate is None:
        return ""
    of = f" of {progress.num_probes}" if progress.num_probes else ""
    setting = describe_setting(progress.candidate.setting)
    parts = [f"[{progress.phase}] probe {progress.probe}{of}: {setting}"]
    if progress.record is not None:
        parts.append(_outcome(progress.record))
    if progress.best is not None:
        parts.append(f"best {probe_rate_text(progress.best)}")
    if progress.seconds_left is not None:
        left = progress.seconds_left
        parts.append(f"{format_seconds(left)} left" if left > 0 else "no time left")
    return " · ".join(parts)


def probe_rate_text(record: MeasurementRecord) -> str:
    """The rate of a measured probe."""
    return f"{record.images_per_second or 0:.4g} {record.counts}/s"


def _outcome(record: MeasurementRecord) -> str:
    """What a probe found, or how else it ended."""
    if record.status != "measured" or record.images_per_second is None:
        reason = record.message.splitlines()[0][:100] if record.message else ""
        return record.status.replace("_", " ") + (f" ({reason})" if reason else "")
    rate, expected = probe_rate_text(record), record.expected
    # What was expected before the search had learned from probes tells nothing of it.
    if expected and expected.basis == "probes" and expected.images_per_second:
        rate += f" (expected {expected.images_per_second[1]:.4g})"
    return ", ".join(filter(None, (rate, memory_text(record))))


ENDINGS = {
    signal.SIGINT: "it was interrupted",
    signal.SIGTERM: "it was ended by SIGTERM",
    signal.SIGHUP: "its terminal was closed (SIGHUP)",
}


class Interrupts:
    """The signals that came. The first raises KeyboardInterrupt, unless signals are held: then the
    next `interruptible` part raises it. So it does if Python dropped the exception, as it does with
    one that is raised in a destructor."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_held = False

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        is_second = self.number is not None
        self.number = self.number or number
        if number == signal.SIGINT if is_second else not self.is_held:
            raise KeyboardInterrupt

    @property
    def ending(self) -> str:
        """Why the search ended."""
        return ENDINGS[signal.Signals(self.number or signal.SIGINT)]

    @property
    def exit_status(self) -> int:
        """The exit status of a process that a signal ended, as shells count it."""
        return 128 + (self.number or signal.SIGINT)


_active: list[Interrupts] = []


@contextmanager
def handle_signals(*numbers: signal.Signals) -> Iterator[Interrupts]:
    """Within, handles the signals `numbers`; nested in another such context, the outer one does.
    Signals that somebody else handles, or that are ignored (`nohup`), are left alone, and so are
    all of them outside the main thread, where Python handles none."""
    if _active:
        yield _active[-1]
        return
    interrupts = Interrupts()
    before = {}
    if threading.current_thread() is threading.main_thread():
        usual = (signal.SIG_DFL, signal.default_int_handler)
        before = {n: h for n in numbers if (h := signal.getsignal(n)) in usual}
    _active.append(interrupts)
    try:
        for number in before:
            signal.signal(number, interrupts.hear)
        yield interrupts
    finally:
        _active.remove(interrupts)
        for number, handler in before.items():
            signal.signal(number, handler)


def ending() -> str:
    """Why a search ended that was ended by a KeyboardInterrupt."""
    return _active[-1].ending if _active else ENDINGS[signal.SIGINT]


def is_ending() -> bool:
    """Whether a signal has come that ends the search."""
    return bool(_active) and _active[-1].number is not None


@contextmanager
def held(is_held: bool = True) -> Iterator[None]:
    """Within, signals are held, except in parts that are `interruptible`."""
    interrupts = _active[-1] if _active else Interrupts()
    before, interrupts.is_held = interrupts.is_held, is_held
    try:
        if not is_held and interrupts.number is not None:
            raise KeyboardInterrupt
        yield
    finally:
        interrupts.is_held = before


def interruptible() -> AbstractContextManager[None]:
    """Within, a signal raises KeyboardInterrupt, also one that came while signals were held."""
    return held(False)


@dataclass(frozen=True)
class MemoryBudget:
    """The memory to search in: the bytes that a setting may take, the cap of a probe (None: none),
    and notes."""

    budget_bytes: int | None
    cap_bytes: int | None
    notes: tuple[str, ...]


def find_budget(
    device: DeviceInfo, in_use: MemoryInUse | None, options: SearchOptions, ranks: int = 1
) -> MemoryBudget:
    """The memory for a setting: the device's or the emulated size, less what other processes hold
    (`in_use`, None where that is not known) and the headroom. On the CPU `ranks` share it."""
    total = in_use.total_bytes if in_use else device.total_bytes
    used = in_use.used_bytes if in_use else 0
    free = in_use.free_bytes if in_use else total
    notes, which = [], " of this machine's memory" if device.kind == "cpu" else ""
    if used > noteworthy_bytes(total):
        notes.append(
            f"Other processes hold {format_bytes(used)} of {format_bytes(total)}{which}: "
            f"{format_bytes(free)} are left."
        )
    if device.kind == "cpu" and ranks > 1:
        free //= ranks
        notes.append(f"{ranks} ranks share this machine's memory: {format_bytes(free)} each.")
    limit = free
    if options.memory_bytes is not None:
        limit = min(free, options.memory_bytes)
        asked = format_bytes(options.memory_bytes)
        notes.append(
            f"Capped to {asked}: this emulates a smaller device, whose speed and context are its "
            "own."
            if options.memory_bytes < total
            else f"--memory {asked} caps nothing: this device has {format_bytes(total)}."
        )
    if device.kind == "cpu":
        notes.append("Memory on the CPU is the growth of the worker's peak resident set.")
    budget = less_headroom(limit, options.headroom)
    notes.append(f"Settings may take {format_bytes(budget)} ({options.headroom:.0%} kept free).")
    capped = options.memory_bytes is not None or device.kind == "cpu"
    return MemoryBudget(budget, limit if capped else None, tuple(notes))


def less_headroom(limit_bytes: int, headroom: float) -> int:
    """The bytes of `limit_bytes` that a setting may take. Raises UsageError where there are
    none."""
    budget = int(limit_bytes * (1 - headroom))
    if budget <= 0:
        raise UsageError(
            f"no memory is left to search in: {format_bytes(limit_bytes)} less {headroom:.0%}.",
            "Free the device of other processes, or lower --headroom.",
        )
    return budget
