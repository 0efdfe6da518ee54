"""Run one probe in a process of its own: spawn, listen, hold to the deadline, end, classify.

Imports no torch and makes no CUDA context. Whatever the worker does, the answer is a record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from statistics import median

from planner.core.schema import DeviceInfo, MeasurementRecord
from search.probe.device import MemoryInUse, describe_device, memory_in_use, versions
from search.probe.parent.attendance import Attendance
from search.probe.parent.environment import rank_threads
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.ranks import put_together, rank_devices, rank_places
from search.probe.protocol import (
    OutcomeMessage,
    ProbeRequest,
    ProgressMessage,
    WorkOrder,
)

# How long a driver may take to give back the memory of a process that has ended: a judgement.
RELEASE_SECONDS = 3.0


@dataclass(frozen=True)
class ProbeEvent:
    """Something a probe has come to. `elapsed_seconds` is since it was started.

    `phase` is start, import, device, build, compile, forward, backward, optimizer, warm-up,
    measure, check or end. While steps are timed, `num_steps` of them took `step_seconds` each (the
    median).
    """

    phase: str
    elapsed_seconds: float
    num_steps: int = 0
    step_seconds: float | None = None


def run_probe(
    request: ProbeRequest,
    *,
    deadline_seconds: float,
    device: DeviceInfo | None = None,
    on_event: Callable[[ProbeEvent], None] | None = None,
    on_result: Callable[[MeasurementRecord], None] | None = None,
    fork_server: ForkServer | None = None,
) -> MeasurementRecord:
    """One short real training run of `request`, from the start of its process to the end of it.

    Returns a record whatever happens to the worker: after `deadline_seconds` it and all that it
    started are ended. Raises UsageError where there is no such device, and what `on_event` raises
    (the worker is ended then, too). Workers are forked from `fork_server`, else from one of their
    own; `device` is how the record describes it, where that is not as `request` says.
    `on_result` is told what the worker measured as soon as it has said so: ending a process that
    holds a device takes a while, in which this one may be killed.
    """
    devices = rank_devices(request.device, request.setting)
    found, *_ = [describe_device(each) for each in dict.fromkeys(devices)]
    cap = {"memory_cap_bytes": request.memory_cap_bytes}
    described = device or found.model_copy(update=cap)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    # What processes hold of a GPU, of which this one is none. The CPU's memory is the worker's own
    # growth: others do not count.
    before = {each: memory_in_use(each) for each in devices if each != "cpu"}
    started = time.monotonic()
    record_of = partial(_record, request, described, date, started)
    is_world = request.setting.parallelism != "none"

    def tell(phase: str, num_steps: int = 0, step_seconds: float | None = None) -> None:
        if on_event is not None:
            elapsed = time.monotonic() - started
            on_event(ProbeEvent(phase, elapsed, num_steps, step_seconds))

    def hear(answer: ProgressMessage) -> None:
        tell(answer.phase, answer.num_steps, answer.step_seconds)

    def whole(outcomes: Sequence[OutcomeMessage]) -> OutcomeMessage:
        return put_together(outcomes, devices) if len(outcomes) > 1 else outcomes[0]

    def measured(outcomes: Sequence[OutcomeMessage]) -> None:
        if on_result is not None:
            on_result(record_of(whole(outcomes)))

    tell("start")
    with (
        nullcontext(fork_server) if fork_server else ForkServer(request.model) as server,
        rank_places(len(devices), rank_threads(len(devices))) as places,
    ):
        orders = [
            WorkOrder(
                request=request.model_copy(update={"device": each}),
                deadline=started + deadline_seconds, place=place if is_world else None,
            )
            for each, place in zip(devices, places, strict=True)
        ]  # fmt: skip
        attendance = Attendance(orders, deadline_seconds, server, hear)
        outcome = whole(attendance.run(measured))
    if outcome.free_bytes is None:
        outcome = _crowded(outcome, before, attendance.has_ended)
    tell("end")
    return record_of(outcome)


def _record(
    request: ProbeRequest, device: DeviceInfo, date: str, started: float, outcome: OutcomeMessage
) -> MeasurementRecord:
    step_seconds = median(outcome.step_seconds) if outcome.step_seconds else None
    return MeasurementRecord(
        probe_id=request.probe_id,
        model=request.model,
        setting=request.setting,
        device=device,
        versions=versions(),
        date=date,
        images_per_second=request.images_per_step / step_seconds if step_seconds else None,
        probe_seconds=time.monotonic() - started,
        **{
            name: getattr(outcome, name)
            for name in MeasurementRecord.model_fields.keys() & OutcomeMessage.model_fields.keys()
        },
    )


def _crowded(
    outcome: OutcomeMessage, before: Mapping[str, MemoryInUse | None], has_ended: bool
) -> OutcomeMessage:
    """`outcome` with what others had left free of its GPUs, and took since: of the worst of them.
    Of a worker that may still live, what it holds is not told from others'."""
    known = {device: memory for device, memory in before.items() if memory is not None}
    if not known:
        return outcome
    free = min(memory.free_bytes for memory in known.values())
    taken = [_taken(device, m.used_bytes) for device, m in known.items()] if has_ended else []
    most = max((n for n in taken if n is not None), default=None)
    return outcome.model_copy(update={"free_bytes": free, "taken_bytes": most})


def _taken(device: str, used_before: int) -> int | None:
    """What others took of a GPU's memory since `used_before` was read, in bytes, where a worker
    that has ended could not say. The driver may still be giving its memory back: that is awaited.
    """
    deadline = time.monotonic() + RELEASE_SECONDS
    while (now := memory_in_use(device)) is not None:
        if now.used_bytes <= used_before or time.monotonic() >= deadline:
            return max(0, now.used_bytes - used_before)
        time.sleep(RELEASE_SECONDS / 30)
    return None
