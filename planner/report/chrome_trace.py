"""A predicted step as a trace that Perfetto and chrome://tracing show: clocks, kernels, memory.

In the Trace Event Format: complete events (X), counters (C) and names (M); `ts` and `dur` are
microseconds, here of whole nanoseconds, so that what follows on one another does not overlap.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from planner import __version__
from planner.core.errors import UsageError
from planner.core.files import check_output, write_output
from planner.estimation.arguments import ModelLike, SettingLike, allocator_here, read_gpu
from planner.estimation.estimate import Estimate, choose, estimate_ledger, may_reserve
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import CATEGORIES, Computed, Ledger
from planner.machine.hardware import Gpu
from planner.machine.hardware.overheads import overheads_for
from planner.memory.allocator_config import AllocatorConfig
from planner.memory.profile import steady_step
from planner.memory.scratch import on_device
from planner.report.live import step_allocator_bytes, step_live_bytes
from planner.report.settings import describe_setting
from planner.throughput.result import datasheet_rates, exchanges_of
from planner.throughput.spans import Span, StepSpans, Track, step_spans

ENDINGS = (".json", ".json.gz")
PROCESS = 1
THREADS: dict[Track, tuple[int, str]] = {
    "device": (1, "device"), "host": (2, "host"), "link": (3, "link between devices"),
}  # fmt: skip

Event = dict[str, Any]


def chrome_trace(
    model: ModelLike,
    setting: SettingLike | None = None,
    *,
    gpu: str | Gpu,
    allocator: str | AllocatorConfig | None = None,
    traced: bool = False,
    link: str | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """The predicted step on `gpu` as a Chrome trace, ready for `json.dump`.

    The arguments are those of `planner.estimate`, and so are its errors.
    """
    device, chosen = read_gpu(gpu), allocator_here(allocator)
    if device is None:
        raise UsageError("a trace needs a device to predict for.", "Name a GPU of 'planner gpus'.")
    config, resolved = choose(model, setting, device, overrides)
    ledger = step_ledger(config, resolved, traced)
    found = estimate_ledger(config, resolved, ledger, device, None, chosen, link=link)
    return trace_of(found, ledger, device, chosen, link)


def trace_of(
    found: Estimate,
    ledger: Ledger,
    gpu: Gpu,
    allocator: AllocatorConfig | None = None,
    link: str | None = None,
) -> dict[str, Any]:
    """The trace of an estimate's step."""
    rates = datasheet_rates(gpu, found.model)
    assert rates is not None, "a GPU has rates"
    setting = found.setting
    step = step_spans(ledger, setting, rates, exchanges_of(ledger, setting, gpu, link))
    title = f"{found.model.title} on {gpu.name}, predicted"
    shown = f"{describe_setting(setting, found.model)}, of {gpu.title}"
    events = [
        *_names(title, step),
        *_phases(step.of("device"), "device"),
        *_phases(step.of("host"), "host"),
        *(_complete(span, step.kernels) for span in step.spans),
        *_memory(ledger, gpu, allocator, step),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "planner": __version__,
            "setting": shown,
            "basis": rates.basis,
            "step_seconds": found.throughput.step_seconds if found.throughput else None,
            "micro_batches_shown": step.micro_batches,
            "micro_batches": setting.accumulate,
            "memory": "counters stand at the device's clock of the operation that follows them",
        },
    }


def write_trace(trace: Mapping[str, Any], path: str | Path) -> Path:
    """Writes a trace as JSON, compressed where the name ends in .gz. Raises as `check_output`, and
    PlannerError where the disk is full."""
    path = check_output(path, "a trace", ENDINGS)
    data = json.dumps(trace, separators=(",", ":")).encode()
    if path.suffix.lower() == ".gz":
        data = gzip.compress(data, 6, mtime=0)
    return write_output(path, data)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _names(title: str, step: StepSpans) -> Iterator[Event]:
    yield _metadata("process_name", 0, {"name": title})
    for track, (thread, name) in THREADS.items():
        if step.of(track):
            yield _metadata("thread_name", thread, {"name": name})
            yield _metadata("thread_sort_index", thread, {"sort_index": thread})


def _metadata(name: str, thread: int, given: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": PROCESS, "tid": thread, "ts": 0, "args": given}


def _phases(spans: Sequence[Span], track: Track) -> Iterator[Event]:
    """What encloses the spans of a phase; optimizers that step in backward make it several."""
    for phase, within in groupby(spans, key=lambda span: span.phase):
        run = list(within)
        yield _event(phase, "phase", track, run[0].start, run[-1].end, {})


def _complete(span: Span, kernels: Sequence[Computed]) -> Event:
    """A kernel, a wait or a collective with what is known of it."""
    known: dict[str, Any] = {"phase": span.phase, "kind": span.kind, "bound by": span.bound}
    name, category = span.kind, "wait"
    if span.kernel >= 0:
        kernel = kernels[span.kernel]
        name = kernel.name.removeprefix("aten.")
        category = "cpu_op" if span.track == "host" else "kernel"  # as torch.profiler calls them
        known |= {"module": kernel.path, "dtype": kernel.dtype, "FLOPs": kernel.flops}
        known |= {"bytes": kernel.num_bytes, "launches": kernel.kernels}
        known |= {"correlation": span.kernel + 1}
    elif span.sent is not None:
        name, category = span.sent.collective, "collective"
        known |= {"module": span.sent.path, "dtype": span.sent.dtype}
        known |= {"bytes": span.sent.num_bytes, "group": span.sent.group}
    return _event(name, category, span.track, span.start, span.end, known)


def _event(
    name: str, category: str, track: Track, start: float, end: float, given: dict[str, Any]
) -> Event:
    first, last = _nanoseconds(start), _nanoseconds(end)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": PROCESS,
        "tid": THREADS[track][0],
        "ts": first / 1000,
        "dur": (last - first) / 1000,
        "args": given,
    }


def _memory(
    ledger: Ledger, gpu: Gpu, allocator: AllocatorConfig | None, step: StepSpans
) -> Iterator[Event]:
    """Live bytes by category, and what the allocator has given out and reserved."""
    outside = overheads_for(gpu, ledger.environment)
    ledger = on_device(ledger, outside.processors)
    live = step_live_bytes(ledger)
    played = step_allocator_bytes(
        ledger, live, outside.workspace_bytes, allocator,
        may_reserve(gpu, None, allocator),
    )  # fmt: skip
    allocated, reserved = played.allocated_bytes, played.reserved_bytes
    times = times_of_moves(ledger, live.events, step)
    categories = [c for c in CATEGORIES if max(live.by_category[c])]
    for point, at in _shown(times, live.total):
        of_category = {c.replace("_", " "): live.by_category[c][point] for c in categories}
        yield _counter("live bytes", at, of_category)
    for point, at in _shown(times, allocated):
        of_allocator = {"allocated": allocated[point], "reserved": reserved[point]}
        yield _counter("allocator bytes", at, of_allocator)


def _counter(name: str, at: int, series: dict[str, int]) -> Event:
    return {"ph": "C", "name": name, "pid": PROCESS, "ts": at / 1000, "args": series}


def times_of_moves(ledger: Ledger, events: Sequence[int], step: StepSpans) -> list[int]:
    """Of each of the step's allocations and releases, the nanosecond at which the device begins the
    operation that follows it."""
    starts = step.starts()
    first = steady_step(ledger).steady_from
    places = [i for i, event in enumerate(ledger.events) if i > first and type(event) is Computed]
    following = [bisect_left(places, event) for event in events]
    end = max(span.end for span in step.of("device"))
    return [_nanoseconds(starts[place] if place < len(starts) else end) for place in following]


def _shown(times: Sequence[int], total: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(point, nanosecond) of what counters show of points at one time: the most, and where they
    end, a nanosecond later."""
    for at, points in groupby(range(len(times)), key=times.__getitem__):
        here = list(points)
        most = max(here, key=total.__getitem__)
        yield most, at
        if here[-1] != most:
            yield here[-1], at + 1
