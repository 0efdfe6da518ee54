"""`planner profile`: one probe that also runs under torch's profiler, and what its trace says."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from planner.core.errors import PlannerError
from planner.core.files import write_whole
from planner.core.schema import MeasurementRecord, Model, TrainSetting
from planner.core.schema.profile import ProfiledOperation, ProfileRecord
from planner.core.units import format_seconds
from planner.machine.hardware import Gpu, recognise_gpu
from planner.throughput.prediction import DeviceRates, StepTime, best_rates
from search.probe.device import choose_device, describe_device, memory_in_use
from search.probe.device_rates import device_rates
from search.probe.evidence import others_ran
from search.probe.interval import median_interval
from search.probe.parent.runner import ProbeEvent, run_probe
from search.probe.protocol import SNAPSHOT_FILE, TRACE_FILE, ProbeRequest, ProfileOrder
from search.probe.quiet import gpu_flags
from search.tuning.profiling.attribution import Attribution, attribute
from search.tuning.profiling.comparing import gap_notes, parts_of, predict
from search.tuning.profiling.trace import read_trace

RECORD_FILE = "profile.json"
STEPS = 3
# A probe that takes longer hangs, as far as anybody would wait; a compiled one may take minutes.
DEADLINE_SECONDS = 900.0
MEASURE_SECONDS = 10.0  # the longest that plain steps are timed for
_NUM_TOP = 12
# What the profiler may make of a step: its own cost is some microseconds an operation. Judgements.
_CREDIBLE = (0.9, 3.0)
# Of the median, half of its interval; and how far measured and predicted may lie apart, as a
# factor, for the difference to be a matter of single operations. Judgements.
_MOST_SPREAD, _FAR = 0.1, 5.0
_NAME_CHARACTERS = 200  # templates of C++ have names of thousands
# Statuses of a probe whose message needs no more words, and what helps where one ended so.
_SAYS_ALL = ("unsupported", "timed_out")
_WAYS_OUT = {
    "timed_out": "Give it longer: --deadline 30m.",
    "out_of_memory": "Take a smaller batch; 'planner estimate' says what fits.",
}


def profile(
    model: Model,
    setting: TrainSetting,
    output: Path,
    *,
    device: str = "auto",
    steps: int = STEPS,
    deadline_seconds: float = DEADLINE_SECONDS,
    measure_seconds: float = MEASURE_SECONDS,
    on_event: Callable[[ProbeEvent], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> ProfileRecord:
    """Runs `setting` as a probe, then `steps` more under the profiler; files go to `output`.

    Files of an earlier profile there are replaced, once all of this one are whole. Raises
    PlannerError where the step does not run or a file cannot be written.
    """
    where = choose_device(device)
    described = describe_device(where)
    gpu = recognise_gpu(described.name, described.total_bytes) if where != "cpu" else None
    with _folder_in(output) as folder:
        request = ProbeRequest(
            model=model,
            setting=setting,
            device=where,
            memory_cap_bytes=_cap_bytes(where),
            max_measure_seconds=measure_seconds,
            profile=ProfileOrder(folder=str(folder.resolve()), steps=steps),
        )
        busy = gpu_flags(where)
        probe = run_probe(
            request, deadline_seconds=deadline_seconds, device=described, on_event=on_event
        )
        probe = probe.model_copy(update={"flags": (*busy, *probe.flags)})
        _refuse_failed(probe, model)
        rates = best_rates(gpu, model, device_rates(where, described, None, say))
        record = _record(probe, folder, rates, gpu)
        _keep(record, folder, output)
    return record


def _cap_bytes(where: str) -> int | None:
    """On a CPU what is free: a step that needs more would take the machine down."""
    free = memory_in_use(where) if where == "cpu" else None
    return None if free is None else free.free_bytes


@contextmanager
def _folder_in(output: Path) -> Iterator[Path]:
    """A folder in `output` that is gone afterwards; and `output` too where nothing came into it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=output, prefix=".profile-")
    except OSError as error:
        why = "it is a file, not a folder" if output.is_file() else error.strerror
        raise PlannerError(
            f"{output} cannot be written: {why}.", "Name another folder with --output."
        ) from None
    try:
        with folder as name:
            yield Path(name)
    finally:
        with suppress(OSError):
            output.rmdir()


def _refuse_failed(probe: MeasurementRecord, model: Model) -> None:
    if probe.status == "measured":
        return
    said = probe.message.strip().partition("\n")[0]
    if not said or probe.status not in _SAYS_ALL:
        how = probe.status.replace("_", " ") + (f" in {probe.phase}" if probe.phase else "")
        said = f"{how}. {said}" if said else f"{how}."
    message = f"no profile of {model.title}: {said.rstrip('.')}."
    raise PlannerError(message, _WAYS_OUT.get(probe.status, ""))


def _keep(record: ProfileRecord, folder: Path, output: Path) -> None:
    try:
        write_whole(folder / RECORD_FILE, record.model_dump_json(indent=1))
        for name in record.files:
            (folder / name).replace(output / name)
    except OSError as error:
        raise PlannerError(f"{output} cannot be written: {error.strerror}.") from None


def _record(
    probe: MeasurementRecord, folder: Path, rates: DeviceRates | None, gpu: Gpu | None
) -> ProfileRecord:
    found = attribute(read_trace(folder / TRACE_FILE))
    files = tuple(name for name in (TRACE_FILE, SNAPSHOT_FILE) if (folder / name).exists())
    step, why = _predicted(probe, rates)
    is_known = found.on_device or probe.device.kind == "cpu"  # else it is the host's time only
    parts = parts_of(found, step, probe.setting) if is_known else ()
    doubts = _doubts(probe, found, step)
    notes = [*_notes(probe, found, files), *why, *doubts]
    if is_known and step is not None and rates is not None and not doubts:
        notes += gap_notes(parts, probe.model, probe.setting, rates, gpu)
    step_seconds = median(probe.step_seconds)
    profiled_seconds = found.wall_seconds / found.num_steps
    return ProfileRecord(
        probe=probe,
        num_steps=found.num_steps,
        step_seconds=step_seconds,
        profiled_step_seconds=profiled_seconds,
        overhead=profiled_seconds / step_seconds,
        parts=parts,
        top=_top(found) if is_known else (),
        predicted_step_seconds=step.step_seconds if step else None,
        uncertainty=step.uncertainty if step else None,
        basis=step.basis if step else "",
        unknown=found.unknown,
        files=(*files, RECORD_FILE),
        notes=tuple(notes),
    )


def _predicted(
    probe: MeasurementRecord, rates: DeviceRates | None
) -> tuple[StepTime | None, list[str]]:
    """The predicted step, or why there is none."""
    if rates is None:
        return None, [f"Nothing is predicted: no rates of {probe.device.name} are known."]
    try:
        return predict(probe.model, probe.setting, rates), []
    except PlannerError as error:
        return None, [f"Nothing is predicted: {error.message.rstrip('.')}."]


def _notes(probe: MeasurementRecord, found: Attribution, files: Sequence[str]) -> list[str]:
    notes = []
    again = sum(seconds for key, seconds in found.seconds.items() if key.recomputes)
    if again:
        notes.append(
            f"Backward computes forward again for {format_seconds(again / found.num_steps)} of a "
            f"step ({again / found.wall_seconds:.0%}): what checkpointing costs."
        )
    if probe.setting.compile != "off":
        notes.append(
            "A compiled kernel does several operations: pointwise ones, reductions and copies are "
            "one row, and what is computed again inside of it cannot be told apart."
        )
    if found.unknown:
        shown = ", ".join(name[:60] for name in found.unknown[:5])
        notes.append(f'Of no known kind, and counted as "other": {shown}.')
    if probe.device.kind == "cpu":
        notes.append(f"No {SNAPSHOT_FILE}: the CPU's allocator keeps no history.")
    elif not found.on_device:
        notes.append("The trace holds no kernel: where the device's time goes is not known.")
    if probe.flags:
        notes.append(f"Noted during the profile: {'; '.join(probe.flags)}.")
    return notes


def _doubts(probe: MeasurementRecord, found: Attribution, step: StepTime | None) -> list[str]:
    """Why no advice is drawn from what was measured: others ran, the steps differ from each other,
    or all of it is far from what is predicted. The last says what to do."""
    interval = median_interval(probe.step_seconds)
    doubts = []
    if flag := others_ran(probe.flags):
        doubts.append(f"Not quiet: {flag}.")
    if interval.half_width > _MOST_SPREAD:
        doubts.append(
            f"Steps took from {format_seconds(min(probe.step_seconds))} to "
            f"{format_seconds(max(probe.step_seconds))}: their median is known to "
            f"±{interval.half_width:.0%} only."
        )
    ratio = found.wall_seconds / found.num_steps / interval.median
    if not _CREDIBLE[0] <= ratio <= _CREDIBLE[1]:
        doubts.append(
            "The profiler does not cost so much, or so little: something else used the machine."
        )
    if step is not None and not 1 / _FAR < interval.median / step.step_seconds < _FAR:
        doubts.append(
            f"A step took {interval.median / step.step_seconds:,.3g} × what is predicted. No one "
            "kind of operation does that: all of it was slowed, or these rates are not this "
            "device's."
        )
    if doubts:
        doubts.append("So no change is named: profile again when the machine is idle.")
    return doubts


def _top(found: Attribution) -> tuple[ProfiledOperation, ...]:
    """The operations or kernels that take most of the step themselves."""
    ranked = sorted(found.names.items(), key=lambda item: -item[1][0])
    return tuple(
        ProfiledOperation(
            name=name[:_NAME_CHARACTERS],
            kind=kind,
            seconds=seconds / found.num_steps,
            calls=calls / found.num_steps,
        )
        for (name, kind), (seconds, calls) in ranked[:_NUM_TOP]
    )
