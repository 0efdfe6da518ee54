"""A setting in a trainer's own terms: `emit` writes what `planner tune` found for one trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from os import PathLike
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from planner.core import files
from planner.core.errors import UnsupportedError, UsageError, shorten
from planner.core.schema import (
    DeviceInfo,
    FactoryModel,
    Model,
    SwinConfig,
    TrainSetting,
    parse,
)
from planner.core.schema.record import RESULT_FORMAT, Recommendation
from planner.core.schema.setting import COMPILED_FIELDS, foreign_options
from planner.core.units import format_bytes
from planner.estimation.arguments import ModelLike, SettingLike, read_model, read_setting
from planner.estimation.predicted import Predicted, is_predicted, read_predicted
from planner.machine.hardware.gpu import check_device_precision
from planner.memory.allocator_config import RECORDED_AS, AllocatorConfig
from planner.trainers import refusals
from planner.trainers.launch import loader_heading, loader_warnings
from planner.trainers.plan import Emitted, Plan, Trainer, one_line, refuse
from planner.trainers.registry import TARGETS, TRAINERS, find_trainer

if TYPE_CHECKING:
    from planner.estimation.estimate import Estimate

__all__ = ["TARGETS", "Emitted", "as_result", "emit", "emit_setting", "read_json", "read_result"]

TASK_TRAINER = "pytorch"  # the one that trains any task


def emit(
    result: object,
    target: str,
    *,
    way: int | None = None,
    changes: Mapping[str, Any] | None = None,
    output: str | PurePath | None = None,
) -> Emitted:
    """A setting that was found, for `target`, one of `TARGETS`.

    `result` is a Recommendation, an Estimate or an Advice; the JSON of one (of estimates several);
    or the path of a file that holds it, or of the directory of `planner tune`. Of several
    estimates, and of an Advice's `ways`, `way` chooses one, counted from 1; an Advice's recommended
    one needs no number. `changes` are fields of TrainSetting to set otherwise.
    What was only predicted is called so, in the file and in the warnings. A trainer of another
    library trains that library's version of the model: it is estimated anew, and the file says that
    it was not measured; so is a setting that trains under DDP. `output` is where you will write the
    file, for its launch line.

    Raises UsageError (unknown target, unreadable result, no such way, a bad change) and
    UnsupportedError (nothing was found to fit, the trainer cannot express the setting, or it would
    not fit).
    """
    trainer = find_trainer(target)
    source = "result"
    if isinstance(result, str | Path):
        result, source = read_json(result)
    elif is_dataclass(result):
        source, result = type(result).__name__, files.to_json(result)
    elif not isinstance(result, Recommendation | Mapping | Sequence):
        way_out = "Pass what planner.estimate, planner.advise or search.tune returned, or a path."
        raise UsageError(f"{shorten(result)} is no result.", way_out)
    elif not isinstance(result, Recommendation | Mapping):
        result = files.to_json(result)
    path = PurePath(output) if output is not None else None
    if is_predicted(result):
        predicted = read_predicted(result, source, way)
        plan = _plan_of_predicted(predicted, changes or {}, path)
        changed = plan.setting != predicted.setting
        return _write(trainer, plan, changed, _device_of(predicted))
    if way is not None:
        raise UsageError(f"--way chooses among predicted settings, and {source} was measured.",
                         "Omit --way.")  # fmt: skip
    found = result if isinstance(result, Recommendation) else as_result(result, source)
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
        output=path,
        unit=found.evidence.unit,
        fed=found.feeding.data if found.feeding else None,
    )
    changed = bool(setting.differences(found.setting))
    return _write(trainer, plan, changed, found.device)


def _plan_of_predicted(
    found: Predicted, changes: Mapping[str, Any], output: PurePath | None
) -> Plan:
    """Raises UnsupportedError where it does not fit as it was predicted."""
    setting = _changed(found.setting, changes)
    if found.shortfall and setting == found.setting:
        raise UnsupportedError(
            f"there is nothing to emit: {found.model.title} with this setting {found.shortfall}.",
            "`planner advise` with the same model and GPU lists ways that fit.",
        )
    over = ", whose upper end does not fit" if found.may_exceed else ""
    said = f"{found.summary} on {found.where}{over}"
    heading = [f"planner: {one_line(found.model.title)}, predicted and not measured: {said}."]
    changed = setting.differences(found.setting)
    if changed:
        heading.append(_changes_line(changed, "predicted"))
    return Plan(
        found.model,
        setting,
        tuple(heading),
        allocator=found.allocator,
        output=output,
        unit=found.figures.unit if found.figures.is_task else None,
        warnings=(f"Predicted, not measured: {said}. `planner tune` measures.",),
        known_by="estimate",
    )


def _device_of(found: Predicted) -> DeviceInfo | None:
    """The device that was predicted for, as a probe on it would name it."""
    gpu, budget = found.gpu, found.figures.budget_bytes
    if gpu is None:
        return DeviceInfo(kind="cuda", name="", total_bytes=budget) if budget is not None else None
    return DeviceInfo(
        kind="cuda",
        name=(*gpu.device_names, gpu.title)[0],
        total_bytes=gpu.memory_bytes,
        capability=gpu.capability,
        memory_cap_bytes=found.memory_bytes,
    )


def emit_setting(
    model: ModelLike,
    setting: SettingLike,
    target: str,
    *,
    device: DeviceInfo | None = None,
    output: str | PurePath | None = None,
) -> Emitted:
    """A model and a setting of your own, which nobody measured, for `target`. Raises as `emit`.

    `model` and `setting` are as `planner.estimate` takes them.
    `device` is what it will train on: a CUDA device of any size where None is given.
    """
    named = read_model(model, {})
    plan = Plan(
        named,
        read_setting(setting, {}),
        (f"planner: {one_line(named.title)}, with a setting that was not measured.",),
        device=device.kind if device is not None else "cuda",
        output=PurePath(output) if output is not None else None,
    )
    return _write(find_trainer(target), plan, False, device)


def read_result(path: str | PathLike[str]) -> Recommendation:
    """The recommendation in a file, or in a directory's `recommendation.json`.

    Raises UsageError: no such file, not JSON, another format version, or fields that do not fit.
    """
    data, source = read_json(path)
    return as_result(data, source)


def read_json(path: str | PathLike[str]) -> tuple[Any, str]:
    """What is in a result's file, and the path of that."""
    file = files.named_path(path, "result")
    if file.is_dir():
        file = file / files.TUNE_RESULT
    try:
        text = files.read_text(file, files.MAX_RESULT_BYTES)
    except files.NoFileError:
        raise UsageError(
            f"{file} does not exist.",
            f"`planner tune MODEL --output DIR` writes {files.TUNE_RESULT} into DIR.",
        ) from None
    try:
        return files.parse_json(text, str(file)), str(file)
    except UsageError as error:
        raise UsageError(
            error.message,
            "Run the command that wrote it again: `planner tune` goes on from its study.",
        ) from None


def as_result(data: object, source: str) -> Recommendation:
    if not isinstance(data, Mapping):
        raise UsageError(f"{source} holds no recommendation: it is not a JSON object.")
    version = data.get("format")
    if version is None:
        raise UsageError(
            f"{source} holds no result of `planner tune`, `planner estimate --json` or "
            "`planner advise --json`.",
            "Name the folder of a tune, or what one of them printed.",
        )
    if version != RESULT_FORMAT:
        raise UsageError(
            f"{source} has result format {version!r}, and this planner reads {RESULT_FORMAT}.",
            "Run `planner tune` again with this version, or emit with the one that wrote it.",
        )
    return parse(Recommendation, data, source)


def _changed(setting: TrainSetting, changes: Mapping[str, Any]) -> TrainSetting:
    """`setting` with `changes`. Where they take away a parallelism, the compiler or adapters, what
    belongs to these goes too."""
    if not changes:
        return setting
    gone = set(COMPILED_FIELDS) if changes.get("compile") == "off" else set()
    if str(changes.get("lora_rank")) == "0":
        gone.add("lora_targets")
    if "parallelism" in changes:
        gone |= foreign_options(changes["parallelism"])
    kept = setting.model_dump(exclude=gone)
    return parse(TrainSetting, {**kept, **changes}, "--set")


def _write(trainer: Trainer, plan: Plan, changed: bool, device: DeviceInfo | None) -> Emitted:
    title, library = trainer.title, trainer.library
    model, name, named = plan.model, plan.model.title, trainer.names(plan)
    is_ported = library is not None and not trainer.trains_named  # which says by itself what it is
    if plan.is_task and trainer.name != TASK_TRAINER and not (named or is_ported):
        law = f"{title} is written for images -> logits, and {name} has a step of its own."
        way_out = f"Use --for {TASK_TRAINER}, whose script trains any task."
        if isinstance(model, FactoryModel) and device is None:
            law = f"{title} takes images -> logits, and no estimate tells whether {name} does."
            way_out = f"Run 'planner tune {name}' first, which does, or use --for {TASK_TRAINER}."
        raise UnsupportedError(law, way_out)
    trained = (
        refusals.port_model(plan.model, library, title) if library and not named else plan.model
    )
    moved = trained is not plan.model
    if device is not None:
        check_device_precision(device, plan.setting.precision)
    faults = refusals.setting_refusals(trained, plan.setting)
    told = plan.setting if named else plan.setting.with_recipe(isinstance(trained, SwinConfig))
    run = refusals.parallel_setting(trainer, told)
    planned = replace(plan, model=trained, setting=run)
    several = refusals.parallel_refusals(trainer, planned, TRAINERS.values())
    unsaid = refusals.word_refusals(trainer, planned)
    refuse(title, [*faults, *several, *unsaid, *trainer.refusals(planned)])
    reasons = []
    if moved:
        assert isinstance(trained, SwinConfig)
        probed = one_line(plan.model.title)
        reasons.append(f"the setting was found for {probed}, and this is {trained.library}'s Swin")
    if changed:
        reasons.append(f"the setting was changed after the {plan.known_by}")
    reasons += refusals.parallel_reasons(trainer, plan.setting, run)
    judged = _judge(trained, planned, device, reasons) if reasons else ()
    loads = loader_warnings(trainer, planned)
    heading = (*plan.heading, *judged, *loader_heading(planned), *loads)
    written = trainer.write(replace(planned, heading=heading))
    return Emitted(
        target=trainer.name,
        filename=trainer.filename,
        text=written.text,
        launch=written.run,
        warnings=(*plan.warnings, *judged, *loads, *written.notes),
        modules=written.modules,
    )


def _judge(
    model: Model, plan: Plan, device: DeviceInfo | None, reasons: list[str]
) -> tuple[str, ...]:
    """A warning of what was not measured and its estimated memory. Raises where it cannot fit."""
    why = "; ".join(reasons)
    if not isinstance(model, SwinConfig):
        return (f"Not measured: {why}.",)
    try:
        found = _estimate(model, plan, device)
    except UnsupportedError as error:
        return (f"Not measured, nor estimated: {why}; {error.message}",)
    total = format_bytes(found.device_total_bytes)
    if found.fits is False:
        raise UnsupportedError(
            f"{why}: it is estimated to take {total} on a CUDA device, which does not fit.",
            "Emit with a smaller --set batch_size=N (and a larger accumulate), "
            f"or tune {model.library}'s own model.",
        )
    return (f"Not measured: {why}. It is estimated to take {total} on a CUDA device.",)


def _estimate(model: SwinConfig, plan: Plan, device: DeviceInfo | None) -> Estimate:
    from planner.estimation.estimate import estimate
    from planner.machine.hardware import recognise_gpu

    chosen = plan.allocator or AllocatorConfig()
    if device is None:
        return estimate(model, plan.setting, allocator=chosen)
    gpu = recognise_gpu(device.name, device.total_bytes) if device.kind == "cuda" else None
    budget = device.memory_cap_bytes or device.total_bytes
    return estimate(model, plan.setting, gpu=gpu, memory_bytes=budget, allocator=chosen)


def _origin(found: Recommendation, setting: TrainSetting) -> tuple[str, ...]:
    """Where the setting comes from: the probe, in a comment's lines."""
    evidence = found.evidence
    assert evidence is not None
    seen = evidence.images_per_second
    rate = f"{seen:.1f} {one_line(evidence.counts)}/s" if seen else "no rate"
    peak = evidence.peak_allocated_bytes
    memory = f", {format_bytes(peak)} allocated at the peak" if peak is not None else ""
    cap = found.device.memory_cap_bytes
    emulated = f" (capped at {format_bytes(cap)}: an emulation)" if cap is not None else ""
    model, device = one_line(found.model.title), one_line(found.device.title)
    torch = one_line(evidence.versions.get("torch", "unknown"))
    if found.device.emulated:
        rate += " (predicted, not measured)"
    lines = [
        f"planner: {model} on {device}{emulated}, probed {one_line(evidence.date)}:",
        f"{rate}{memory}, torch {torch}.",
    ]
    changed = setting.differences(found.setting) if found.setting else {}
    if changed:
        lines.append(_changes_line(changed, "measured"))
    return tuple(lines)


def _changes_line(changed: Mapping[str, Any], how: str) -> str:
    said = ", ".join(f"{field}={value}" for field, value in changed.items())
    return f"Changed since, and so not what was {how}: {said}."
