"""`planner profile`: one probe that also runs under torch's profiler, its seconds by kind of
operation beside the predicted ones, and the trace for Perfetto."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from planner.core.errors import PlannerError
from planner.core.files import write_whole
from planner.core.schema import MeasurementRecord, Model, TrainSetting
from planner.core.schema.record import ProfiledKind, ProfiledOperation, ProfileRecord
from planner.estimation.estimate import resolve
from planner.estimation.ledgers import step_ledger
from planner.machine.hardware import recognise_gpu
from planner.throughput.prediction import DeviceRates, StepTime, rates_for
from planner.throughput.result import step_time
from search.probe.device import choose_device, describe_device, memory_in_use
from search.probe.parent.runner import ProbeEvent, run_probe
from search.probe.protocol import OPERATIONS_FILE, TRACE_FILE, ProbeRequest, ProfileOrder

RECORD_FILE = "profile.json"
STEPS, NUM_TOP = 3, 12
# A probe that takes longer hangs, as far as anybody would wait; a compiled one may take minutes.
DEADLINE_SECONDS = 900.0
# What a compiler makes one kernel of: which of them a kernel is can no longer be told.
FUSIBLE = ("pointwise", "reduction", "copy", "fused")


def profile(
    model: Model, setting: TrainSetting, output: Path, *, device: str = "auto", steps: int = STEPS,
    deadline_seconds: float = DEADLINE_SECONDS,
    on_event: Callable[[ProbeEvent], None] | None = None,
) -> ProfileRecord:  # fmt: skip
    """Runs `setting` as a probe, then `steps` more under the profiler; files go to `output`.

    Files of an earlier profile there are replaced at the end. Raises PlannerError where the step
    does not run or a file cannot be written.
    """
    where = choose_device(device)
    described = describe_device(where)
    gpu = recognise_gpu(described.name, described.total_bytes) if where != "cpu" else None
    # On a CPU what is free: a step that needs more would take the machine down.
    free = memory_in_use(where) if where == "cpu" else None
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file, not a folder" if output.is_file() else error.strerror
        raise _unwritable(output, why) from None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request = ProbeRequest(
            model=model, setting=setting, device=where,
            memory_cap_bytes=None if free is None else free.free_bytes,
            profile=ProfileOrder(folder=name, steps=steps),
        )  # fmt: skip
        probe = run_probe(
            request, deadline_seconds=deadline_seconds, device=described, on_event=on_event
        )
        if probe.status != "measured":
            said = probe.message.strip().partition("\n")[0] or "it says no more"
            how = probe.status.replace("_", " ")
            raise PlannerError(f"no profile of {model.title}: {how} in {probe.phase}. {said}")
        rates = None if gpu is None else rates_for(gpu, model)
        found = json.loads((folder / OPERATIONS_FILE).read_text("utf-8"))
        record = make_record(probe, steps, found, rates)
        try:
            shutil.move(folder / TRACE_FILE, output / TRACE_FILE)
            write_whole(output / RECORD_FILE, record.model_dump_json(indent=1))
        except OSError as error:
            raise _unwritable(output, error.strerror) from None
    return record


def _unwritable(output: Path, why: str | None) -> PlannerError:
    return PlannerError(f"{output} cannot be written: {why}.", "Name another with --output.")


def make_record(
    probe: MeasurementRecord, steps: int, found: dict[str, object], rates: DeviceRates | None
) -> ProfileRecord:
    """What the worker wrote, a step's share of it, beside the prediction."""
    rows: list[tuple[str, str, float, int]] = found["operations"]  # type: ignore[assignment]
    whole = float(found["seconds"]) / steps  # type: ignore[arg-type]
    setting, notes = probe.setting, []
    measured: dict[str, float] = defaultdict(float)
    for _, kind, seconds, _ in rows:
        measured[_row(kind, setting)] += seconds / steps
    idle = whole - sum(measured.values())
    if probe.device.kind == "cuda" and not rows:
        notes.append("The trace holds no kernel: where the device's time goes is not known.")
    elif idle > 0:
        measured["waiting for the host"] = measured.pop("host", 0.0) + idle
    step: StepTime | None = None
    try:
        resolved = resolve(probe.model, setting)[1]
        gpu = recognise_gpu(probe.device.name, probe.device.total_bytes)
        ledger = step_ledger(probe.model, resolved, gpu=gpu) if rates else None
        step = step_time(ledger, resolved, rates) if ledger else None
    except PlannerError as error:
        notes.append(f"Nothing is predicted: {error.message.rstrip('.')}.")
    if rates is None:
        notes.append(f"Nothing is predicted: no rates of {probe.device.name} are known.")
    expected: dict[str, float] = defaultdict(float)
    for part in step.parts if step is not None else ():
        expected[_row(part.kind, setting)] += part.seconds
    kinds = tuple(
        ProfiledKind(
            kind=kind, measured_seconds=measured[kind],
            predicted_seconds=expected[kind] if step is not None else None,
        )
        for kind in sorted({**expected, **measured}, key=lambda kind: -measured[kind])
    )  # fmt: skip
    if probe.flags:
        notes.append(f"Noted during the profile: {'; '.join(probe.flags)}.")
    top = sorted(rows, key=lambda row: -row[2])[:NUM_TOP]
    return ProfileRecord(
        probe=probe, num_steps=steps, step_seconds=median(probe.step_seconds),
        profiled_step_seconds=whole, kinds=kinds,
        top=tuple(
            ProfiledOperation(name=name, kind=kind, seconds=seconds / steps, calls=calls / steps)
            for name, kind, seconds, calls in top
        ),
        predicted_step_seconds=step.step_seconds if step else None,
        uncertainty=step.uncertainty if step else None, basis=step.basis if step else "",
        files=(TRACE_FILE, RECORD_FILE), notes=tuple(notes),
    )  # fmt: skip


def _row(kind: str, setting: TrainSetting) -> str:
    """Under a compiler all that it may fuse is one row; torch's profiler tells no groups."""
    if kind == "grouped conv":
        return "conv"
    is_fused = setting.compile != "off" and kind in FUSIBLE
    return ", ".join(FUSIBLE[:3]) if is_fused else kind
