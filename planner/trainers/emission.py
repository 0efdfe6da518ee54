"""A setting in a trainer's own terms: `emit` writes what `planner tune` found for one trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, Protocol

from planner.errors import UnsupportedError, UsageError
from planner.files import (
    MAX_RESULT_BYTES,
    TUNE_RESULT,
    NoFileError,
    named_path,
    parse_json,
    read_text,
)
from planner.hardware.precisions import check_device_precision
from planner.memory.allocator_config import RECORDED_AS
from planner.schema import DeviceInfo, Model, SwinConfig, TrainSetting, parse
from planner.schema.result import RESULT_FORMAT, Recommendation
from planner.trainers.building import FILENAME as CODE_FILENAME
from planner.trainers.comments import one_line
from planner.trainers.levers import lever_refusals
from planner.trainers.loader import loader_heading, loader_warnings
from planner.trainers.parallelism import (
    as_written,
    fitted_buckets,
    parallel_reasons,
    parallel_refusals,
    parallel_setting,
)
from planner.trainers.plan import Emitted, Plan, Trainer, refuse
from planner.trainers.ported_model import port_model, setting_refusals
from planner.trainers.registry import TARGETS, TRAINERS, find_trainer
from planner.units import format_bytes

__all__ = ["TARGETS", "Emitted", "emit", "emit_setting", "read_result"]

TASK_TRAINER = "pytorch"  # the one that trains any task


_FITTED = "DeepSpeed's own buckets hold 500,000,000 elements, and these are fit for the model"
_CHANGED = "the setting was changed after the probe"


class Judged(Protocol):
    """What is asked of an estimate: bytes on the device, and whether they fit its budget."""

    @property
    def device_total_bytes(self) -> int: ...
    @property
    def fits(self) -> bool | None: ...


Estimator = Callable[[SwinConfig, TrainSetting, DeviceInfo | None], Judged]
"""(model, setting, device or None) -> an estimate; `planner.estimate` unless another is given."""


def emit(
    result: Recommendation | Mapping[str, Any] | str | Path,
    target: str,
    *,
    changes: Mapping[str, Any] | None = None,
    estimator: Estimator | None = None,
    output: str | PurePath | None = None,
) -> Emitted:
    """The recommended setting for `target`, one of `TARGETS`.

    `result` is a Recommendation, its JSON as a mapping, or the path of `recommendation.json` or of
    the directory that holds it. `changes` are fields of TrainSetting to set otherwise than probed.
    A trainer of another library than the one probed trains that library's version of the
    model: it is estimated anew (`estimator`), and the file says that it was not measured; so is a
    setting that trains under DDP. `output` is where you will write the file, for its launch line.

    Raises UsageError (unknown target, unreadable result, a bad change) and UnsupportedError
    (nothing was found to fit, the trainer cannot express the setting, or it would not fit).
    """
    trainer = find_trainer(target)
    if isinstance(result, str | Path):
        result = read_result(result)
    found = result if isinstance(result, Recommendation) else _as_result(result, "result")
    if found.setting is None or found.evidence is None:
        raise UnsupportedError(
            f"there is nothing to emit: no setting of {found.model.title} "
            f"{'fitted' if found.num_probes else 'was probed'} on {found.device.name}.",
            found.advice or "Tune with a smaller batch, checkpointing or a smaller model.",
        )
    setting = _changed(found.setting, changes or {})
    plan = Plan(
        found.model,
        setting,
        _origin(found, setting),
        device=found.device.kind,
        allocator=found.evidence.versions.get(RECORDED_AS),
        output=PurePath(output) if output is not None else None,
        unit=found.evidence.unit,
        loader=found.feeding.loader if found.feeding else None,
        fed=found.feeding.evidence if found.feeding else None,
    )
    changed = bool(setting.differences(found.setting))
    return _write(trainer, plan, changed, found.device, estimator)


def emit_setting(
    model: Model,
    setting: TrainSetting,
    target: str,
    *,
    estimator: Estimator | None = None,
    device: DeviceInfo | None = None,
    output: str | PurePath | None = None,
) -> Emitted:
    """A model and a setting of your own, which nobody measured, for `target`. Raises as `emit`.

    `device` is what it will train on: a CUDA device of any size where None is given.
    """
    plan = Plan(
        model,
        setting,
        (f"planner: {one_line(model.title)}, with a setting that was not measured.",),
        device=device.kind if device is not None else "cuda",
        output=PurePath(output) if output is not None else None,
    )
    return _write(find_trainer(target), plan, False, device, estimator)


def read_result(path: str | PathLike[str]) -> Recommendation:
    """The recommendation in a file, or in a directory's `recommendation.json`.

    Raises UsageError: no such file, not JSON, another format version, or fields that do not fit.
    """
    file = named_path(path, "result")
    if file.is_dir():
        file = file / TUNE_RESULT
    try:
        text = read_text(file, MAX_RESULT_BYTES)
    except NoFileError:
        raise UsageError(
            f"{file} does not exist.",
            f"`planner tune MODEL --output DIR` writes {TUNE_RESULT} into DIR.",
        ) from None
    try:
        data = parse_json(text, str(file))
    except UsageError as error:
        raise UsageError(
            error.message,
            "Run the same `planner tune` again: it goes on from its study and rewrites the file.",
        ) from None
    return _as_result(data, str(file))


def _as_result(data: object, source: str) -> Recommendation:
    if not isinstance(data, Mapping):
        raise UsageError(f"{source} holds no recommendation: it is not a JSON object.")
    version = data.get("format")
    if version != RESULT_FORMAT:
        raise UsageError(
            f"{source} has result format {version!r}, and this planner reads {RESULT_FORMAT}.",
            "Run `planner tune` again with this version, or emit with the one that wrote it.",
        )
    return parse(Recommendation, data, source)


def _changed(setting: TrainSetting, changes: Mapping[str, Any]) -> TrainSetting:
    return parse(TrainSetting, {**setting.model_dump(), **changes}, "--set") if changes else setting


def _write(
    trainer: Trainer,
    plan: Plan,
    changed: bool,
    device: DeviceInfo | None,
    estimator: Estimator | None,
) -> Emitted:
    title, library = trainer.title, trainer.library
    if plan.is_task and trainer.name != TASK_TRAINER:
        raise UnsupportedError(
            f"{title} is written for images -> logits, and {plan.model.title} has a step of its "
            "own.",
            f"Use --for {TASK_TRAINER}, whose script trains any task.",
        )
    trained = port_model(plan.model, library, title) if library else plan.model
    moved = trained is not plan.model
    if device is not None:
        check_device_precision(device, plan.setting.precision)
    faults = setting_refusals(trained, plan.setting, trainer.models)
    asked = parallel_setting(plan.setting, trainer.always_ddp)
    planned = replace(plan, model=trained, setting=asked)
    several = parallel_refusals(trainer, planned, TRAINERS.values())
    levers = lever_refusals(trainer, planned)
    refuse(title, [*faults, *several, *levers, *trainer.refusals(planned)])
    fitted = fitted_buckets(trained, asked)
    run = as_written(trainer, fitted)
    planned = replace(planned, setting=run)
    reasons = []
    if moved:
        assert isinstance(trained, SwinConfig)
        probed = one_line(plan.model.title)
        reasons.append(f"the setting was found for {probed}, and this is {trained.library}'s Swin")
    if changed:
        reasons.append(_CHANGED)
    if fitted != asked:
        reasons.append(_FITTED)
    reasons += parallel_reasons(trainer, plan.setting, fitted, run)
    judged = _judge(trained, run, device, reasons, estimator) if reasons else ()
    loads = loader_warnings(trainer, planned)
    heading = (*plan.heading, *judged, *loader_heading(planned), *loads)
    written = trainer.write(replace(planned, heading=heading))
    return Emitted(
        target=trainer.name,
        filename=trainer.filename,
        text=written.text,
        launch=written.run,
        warnings=(*judged, *loads, *written.notes),
        code=written.code,
        code_filename=CODE_FILENAME if written.code else "",
    )


def _judge(
    model: Model,
    setting: TrainSetting,
    device: DeviceInfo | None,
    reasons: list[str],
    estimator: Estimator | None,
) -> tuple[str, ...]:
    """A warning of what was not measured and its estimated memory. Raises where it cannot fit."""
    why = "; ".join(reasons)
    if not isinstance(model, SwinConfig):
        return (f"Not measured: {why}.",)
    try:
        estimate = (estimator or _estimate)(model, setting, device)
    except UnsupportedError as error:
        return (f"Not measured, nor estimated: {why}; {error.message}",)
    total = format_bytes(estimate.device_total_bytes)
    if estimate.fits is False:
        raise UnsupportedError(
            f"{why}: it is estimated to take {total} on a CUDA device, which does not fit.",
            "Emit with a smaller --set batch_size=N (and a larger accumulate), "
            f"or tune {model.library}'s own model.",
        )
    return (f"Not measured: {why}. It is estimated to take {total} on a CUDA device.",)


def _estimate(model: SwinConfig, setting: TrainSetting, device: DeviceInfo | None) -> Judged:
    from planner.estimation import estimate
    from planner.hardware import recognise_gpu

    if device is None:
        return estimate(model, setting)
    gpu = recognise_gpu(device.name, device.total_bytes) if device.kind == "cuda" else None
    budget = device.memory_cap_bytes or device.total_bytes
    return estimate(model, setting, gpu=gpu, memory_bytes=budget)


def _origin(found: Recommendation, setting: TrainSetting) -> tuple[str, ...]:
    """Where the setting comes from: the probe, in a comment's lines."""
    evidence = found.evidence
    assert evidence is not None
    rate = f"{evidence.images_per_second:.1f} images/s" if evidence.images_per_second else "no rate"
    peak = evidence.peak_allocated_bytes
    memory = f", {format_bytes(peak)} allocated at the peak" if peak is not None else ""
    emulated = (
        f" (capped at {format_bytes(found.device.memory_cap_bytes)}: an emulation)"
        if found.device.memory_cap_bytes is not None
        else ""
    )
    model, device = one_line(found.model.title), one_line(found.device.name)
    torch = one_line(evidence.versions.get("torch", "unknown"))
    lines = [
        f"planner: {model} on {device}{emulated}, probed {one_line(evidence.date)}:",
        f"{rate}{memory}, torch {torch}.",
    ]
    changed = setting.differences(found.setting) if found.setting else {}
    if changed:
        said = ", ".join(f"{field}={value}" for field, value in changed.items())
        lines.append(f"Changed since, and so not what was measured: {said}.")
    return tuple(lines)
