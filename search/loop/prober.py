"""Probes on a device, as a session asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from planner.core.schema import DeviceInfo, MeasurementRecord, Model
from search.loop.progress import OnProgress, Progress
from search.loop.space import Choice
from search.probe.parent.fork_server import STEP_MODULES, ForkServer
from search.probe.parent.runner import ProbeEvent, run_probe
from search.probe.protocol import FINALIST_SECONDS, ProbeRequest

FIRST_SHARE = 0.1  # of the time left, that the steps of the first probe are timed for at most


class Prober(Protocol):
    """Runs one probe to its end, whatever that is, within `deadline_seconds`."""

    def __call__(
        self, choice: Choice, probe_id: str, deadline_seconds: float
    ) -> MeasurementRecord: ...


class DeviceProber:
    """Runs probes on a device, each in a worker process of its own.

    `described` is the device as the study knows it: its `memory_cap_bytes` is an emulation that was
    asked for, whereas `cap_bytes` also keeps a probe on the CPU within the memory that is free.

    `on_result` is told what a worker measured before its process has ended.

    Workers are forked from one process that has imported torch and the model's library. It begins
    to when this is entered as a context, beside whatever its maker does before the first probe.
    """

    on_result: Callable[[MeasurementRecord], None] | None = None

    def __init__(
        self, model: Model, device: str, described: DeviceInfo, cap_bytes: int | None,
        on_progress: OnProgress, modules: Sequence[str] = STEP_MODULES,
    ) -> None:  # fmt: skip
        self.model, self.device, self.described = model, device, described
        self.cap_bytes, self.on_progress, self.modules = cap_bytes, on_progress, modules

    def __enter__(self) -> DeviceProber:
        self.fork_server = ForkServer(self.model, self.modules)
        return self

    def __exit__(self, *_: object) -> None:
        self.fork_server.close()

    def __call__(self, choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        request = ProbeRequest(
            probe_id=probe_id,
            model=self.model,
            setting=choice.candidate.setting,
            device=self.device,
            memory_cap_bytes=self.cap_bytes,
            give_up_images_per_second=choice.give_up_images_per_second,
            **self._timing(choice, deadline_seconds),
        )
        return run_probe(
            request,
            deadline_seconds=deadline_seconds,
            on_event=self._hear,
            device=self.described,
            on_result=self.on_result,
            fork_server=self.fork_server,
        )

    def _timing(self, choice: Choice, deadline_seconds: float) -> dict[str, float]:
        """What is probed once more is timed for longer where clocks drift: on a GPU. The
        first probe of a short budget leaves time for others."""
        if choice.phase == "calibrate":
            most = ProbeRequest.model_fields["max_measure_seconds"].default
            return {"max_measure_seconds": min(most, FIRST_SHARE * deadline_seconds)}
        if choice.phase == "finalists" and self.device != "cpu":
            return {"min_measure_seconds": FINALIST_SECONDS}
        return {}

    def _hear(self, event: ProbeEvent) -> None:
        self.on_progress(
            Progress(
                "step", phase=event.phase, num_steps=event.num_steps,
                step_seconds=event.step_seconds,
            )
        )  # fmt: skip
