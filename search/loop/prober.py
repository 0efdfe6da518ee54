"""Probes on a device, as a session asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from planner.core.schema import DeviceInfo, MeasurementRecord, Model
from search.loop.progress import OnProgress, step_progress
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


def show_steps(
    on_progress: OnProgress,
) -> Callable[[ProbeEvent], None]:
    """Passes on where a running probe is."""
    return lambda event: on_progress(
        step_progress(event.phase, event.num_steps, event.step_seconds)
    )


class DeviceProber:
    """Runs probes on a device, each in a worker process of its own.

    `described` is the device as the study knows it: its `memory_cap_bytes` is an emulation that was
    asked for, whereas `cap_bytes` also keeps a probe on the CPU within the memory that is free.

    `on_result` is told what a worker measured before its process has ended.

    Workers are forked from one process that has imported torch and the model's library. It begins
    to when this is entered as a context, beside whatever its maker does before the first probe;
    `close` ends it.
    """

    def __init__(
        self, model: Model, device: str, described: DeviceInfo, cap_bytes: int | None,
        on_event: Callable[[ProbeEvent], None] | None = None,
        on_result: Callable[[MeasurementRecord], None] | None = None,
        measure_seconds: float | None = None,
        modules: Sequence[str] = STEP_MODULES,
    ) -> None:  # fmt: skip
        self.model, self.device, self.described = model, device, described
        self.cap_bytes, self.on_event = cap_bytes, on_event
        self.on_result, self.modules = on_result, modules
        self.timing: dict[str, float] = {}
        if measure_seconds is not None:
            self.timing["max_measure_seconds"] = measure_seconds
        self.fork_server: ForkServer | None = None

    def __enter__(self) -> DeviceProber:
        self._prepare()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fork_server is not None:
            self.fork_server.close()
            self.fork_server = None

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
        self._prepare()
        return run_probe(
            request,
            deadline_seconds=deadline_seconds,
            on_event=self.on_event,
            device=self.described,
            on_result=self.on_result,
            fork_server=self.fork_server,
        )

    def _timing(self, choice: Choice, deadline_seconds: float) -> dict[str, float]:
        """What is probed once more is timed for longer where clocks drift: on a GPU. The
        first probe of a short budget leaves time for others."""
        if choice.phase == "calibrate":
            most = min(
                ProbeRequest.model_fields["max_measure_seconds"].default,
                FIRST_SHARE * deadline_seconds,
            )
            return {"max_measure_seconds": most, **self.timing}
        if choice.phase == "finalists" and self.device != "cpu":
            return {"min_measure_seconds": FINALIST_SECONDS, **self.timing}
        return self.timing

    def _prepare(self) -> None:
        if self.fork_server is None:
            self.fork_server = ForkServer(self.model, self.modules)
