"""A predicted step as a trace that Perfetto and chrome://tracing show: clocks and kernels.

In the Trace Event Format: complete events (X) and names (M); `ts` and `dur` are
microseconds, here of whole nanoseconds, so that what follows on one another does not overlap.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from planner import __version__
from planner.core.errors import UsageError
from planner.core.files import check_output, write_output
from planner.estimation.arguments import ModelLike, SettingLike, allocator_here, read_gpu
from planner.estimation.estimate import Estimate, choose, estimate_ledger
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Computed, Ledger
from planner.machine.hardware import Gpu
from planner.memory.allocator_config import AllocatorConfig
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
    return trace_of(found, ledger, device, link)


def trace_of(found: Estimate, ledger: Ledger, gpu: Gpu, link: str | None) -> dict[str, Any]:
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
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "planner": __version__, "setting": shown, "basis": rates.basis,
            "step_seconds": found.throughput.step_seconds if found.throughput else None,
            "micro_batches_shown": step.micro_batches, "micro_batches": setting.accumulate,
        },
    }  # fmt: skip


def write_trace(trace: Mapping[str, Any], path: str | Path) -> Path:
    """Writes a trace as JSON, compressed where the name ends in .gz. Raises as `check_output`, and
    PlannerError where the disk is full."""
    path = check_output(path, "a trace", ENDINGS)
    data = json.dumps(trace, separators=(",", ":")).encode()
    if path.suffix.lower() == ".gz":
        data = gzip.compress(data, 6, mtime=0)
    return write_output(path, data)


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
    first, last = round(start * 1e9), round(end * 1e9)
    return {
        "ph": "X", "name": name, "cat": category, "pid": PROCESS, "tid": THREADS[track][0],
        "ts": first / 1000, "dur": (last - first) / 1000, "args": given,
    }  # fmt: skip
