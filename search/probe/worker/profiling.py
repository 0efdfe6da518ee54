"""Some steps under torch's profiler: the trace, and what each operation of torch took itself."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from planner.core.errors import PlannerError
from planner.core.units import format_bytes
from planner.ledger.kinds import NO_KERNEL, kind_of
from planner.training.step import Training
from search.probe.protocol import OPERATIONS_FILE, PROFILE_MARK, TRACE_FILE, ProfileOrder
from search.probe.worker.meter import Meter
from search.probe.worker.subject import StepPhases

_WAIT, _WARM_UP = 1, 1  # steps before those that are kept: the first ones start the profiler


def profile_steps(
    training: Training, meter: Meter, phases: StepPhases, order: ProfileOrder
) -> None:
    """Runs `order.steps` marked steps and writes the trace and the operations into the folder.

    The device is waited for before the first and after the last, and not between: the host runs
    ahead as it does in training. Raises PlannerError where a file cannot be written.
    """
    folder = Path(order.folder)
    is_cuda = training.device_type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    marks, before, began = ExitStack(), _WAIT + _WARM_UP, 0.0

    def mark(phase: str) -> None:
        """From now on, and until now the one before."""
        marks.close()
        marks.enter_context(record_function(PROFILE_MARK + phase))

    def on_phase(ended: str) -> None:
        phases(ended)
        if ended == "zero_grad":
            marks.close()
        else:
            mark(phases.current)

    steps = schedule(wait=_WAIT, warmup=_WARM_UP, active=order.steps, repeat=1)
    with profile(activities=activities, schedule=steps, acc_events=True) as profiler:
        for step in range(before + order.steps):
            if step == before:
                meter.synchronize()
                began = time.perf_counter()
            mark("forward")
            training.step(on_phase)
            if step == before + order.steps - 1:
                meter.synchronize()
                wall = time.perf_counter() - began
            profiler.step()
    found = {"seconds": wall, "operations": operations(profiler.key_averages(), is_cuda)}
    try:
        (folder / OPERATIONS_FILE).write_text(json.dumps(found), encoding="utf-8")
        profiler.export_chrome_trace(str(folder / TRACE_FILE))
    except OSError as error:
        raise PlannerError(f"{TRACE_FILE} cannot be written: {error.strerror}.") from None
    if not (folder / TRACE_FILE).exists():  # torch says nothing of a full disk
        free = format_bytes(shutil.disk_usage(folder).free)
        raise PlannerError(f"the profiler left no trace, and {free} are free there.")


def operations(averages: Any, is_cuda: bool) -> list[tuple[str, str, float, int]]:
    """(name, kind, seconds of its own, calls) of each operation. On a GPU these are the seconds of
    the kernels that the operation itself launched, as torch's profiler counts them."""
    rows = []
    for event in averages:
        if event.device_type == DeviceType.CPU and not event.key.startswith("ProfilerStep"):
            own = event.self_device_time_total if is_cuda else event.self_cpu_time_total
            if own > 0:
                rows.append((event.key[:200], profiled_kind(event.key), own * 1e-6, event.count))
    return rows


def profiled_kind(name: str) -> str:
    """The kind of an operation as the profiler names it. `host` is what computes nothing itself:
    nodes of autograd, views, and operations that torch composes of others."""
    house, _, inner = name.rpartition("::")
    if name.lower().startswith("memcpy"):
        return "copy"
    if house != "aten":
        return "fused" if name.startswith(("triton_", "## Call Compiled")) else "host"
    if inner in NO_KERNEL or _composes(inner):
        return "host"
    if "conv" in inner:
        return "conv"
    plain = inner.rstrip("_") or inner
    known = {kind_of(inner), kind_of(plain)} - {"pointwise"}
    if known:
        return next(iter(known))
    return "reduction" if "norm" in inner or "pool" in inner else "pointwise"


def _composes(name: str) -> bool:
    """Whether torch makes the operation of others, or it only views what is there."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    overload = getattr(packet, packet.overloads()[0])
    written = [r.alias_info for r in overload._schema.returns if r.alias_info is not None]
    views = bool(written) and not any(alias.is_write for alias in written)
    qualified = f"aten::{name}"
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return views or torch._C._dispatch_has_kernel_for_dispatch_key(
        f"{qualified}.{overload._overloadname}".removesuffix(".default"), composite
    )
