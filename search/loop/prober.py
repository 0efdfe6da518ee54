"""Probes on a device, as a search makes them, and the progress that they report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from planner.core.schema import DeviceInfo, MeasurementRecord, Model
from planner.core.units import format_seconds
from planner.report.searches import memory_text
from planner.report.text import describe_setting
from search.loop.space import Candidate, Pick
from search.probe.parent import STEP_MODULES, ProbeServer, run_probe
from search.probe.protocol import REPEAT_SECONDS, ProbeRequest, ProgressMessage

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
        if pick.stage == "repeat" and self.device != "cpu":
            return {"min_measure_seconds": REPEAT_SECONDS}
        return {}

    def _hear(self, event: ProgressMessage) -> None:
        self.on_progress(
            Progress(
                "step", phase=event.phase, num_steps=event.num_steps,
                step_seconds=event.step_seconds,
            )
        )  # fmt: skip


ProgressKind = Literal["note", "start", "step", "end"]


@dataclass(frozen=True)
class Progress:
    """An event of a search.

    `stage` is the search's, and `phase` at a step the worker's. `probe` counts from 1, of
    `num_probes` (None: no limit). A start has the `deadline_seconds` after which the probe is given
    up, a step the `num_steps` that took `step_seconds` each, an end the `record`. `best` is the
    best so far."""

    kind: ProgressKind
    text: str = ""
    stage: str = ""
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
    """An event as a line: stage, probe n of N, the setting, what it found, the best so far, the
    time left. "" for a step, which has no line of its own."""
    if progress.kind == "note":
        return progress.text
    if progress.kind not in ("start", "end") or progress.candidate is None:
        return ""
    of = f" of {progress.num_probes}" if progress.num_probes else ""
    setting = describe_setting(progress.candidate.setting)
    parts = [f"[{progress.stage}] probe {progress.probe}{of}: {setting}"]
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
