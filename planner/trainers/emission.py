"""A setting in a trainer's own terms: `emit` writes one that was tuned or predicted, `emit_setting`
one of your own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from os import PathLike
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from planner.core import files
from planner.core.errors import UnsupportedError, UsageError, refuse_if, shorten
from planner.core.schema import DeviceInfo, FactoryModel, Model, SwinConfig, TrainSetting, parse
from planner.core.schema.record import RESULT_FORMAT, Recommendation
from planner.core.schema.setting import COMPILED_FIELDS, foreign_options
from planner.core.units import format_bytes
from planner.estimation.arguments import ModelLike, SettingLike, read_model, read_setting
from planner.estimation.predicted import Predicted, is_predicted, read_predicted
from planner.machine.hardware.gpu import check_device_precision
from planner.memory.allocator_config import RECORDED_AS, AllocatorConfig
from planner.trainers import faults
from planner.trainers.launch import loader_heading, loader_warnings
from planner.trainers.plan import Emitted, Plan, Trainer, one_line, refuse
from planner.trainers.registry import TARGETS, TRAINERS, find_trainer

if TYPE_CHECKING:
    from planner.estimation.arguments import ResultLike
    from planner.estimation.estimate import Estimate

__all__ = ["TARGETS", "Emitted", "as_result", "emit", "emit_setting", "read_json", "read_result"]

TASK_TRAINER = "pytorch"  # the only one that trains any task


def emit(
    result: ResultLike,
    target: str,
    *,
    way: int | None = None,
    changes: Mapping[str, Any] | None = None,
    output: str | PurePath | None = None,
) -> Emitted:
    """The files that train with a tuned or predicted setting, for the trainer `target`, one of
    `TARGETS`.

    `result` is a Recommendation, an Estimate or an Advice; or its JSON (also of several estimates);
    or the path of a file that holds it, or of the directory of `planner tune`. `way` chooses one of
    several estimates or of an Advice's `ways`, counted from 1; without it an Advice's
    recommendation counts. `changes` are fields of TrainSetting to change.

    A prediction is called a prediction, in the file and in the warnings. A trainer of another
    library trains that library's version of the model: the memory is then estimated again, and the
    file says that nobody measured it. The same holds for a setting that trains under DDP. `output`
    is the path where you will write the file, for the launch command.

    Raises UsageError (unknown target, unreadable result, no such way, a bad change) and
    UnsupportedError (no setting fits, the trainer cannot express the setting, or it would not fit).
    """
    trainer = find_trainer(target)
    found, source = read_found(result)
    path = PurePath(output) if output is not None else None
    if is_predicted(found):
        predicted = read_predicted(found, source, way)
        plan = _make_predicted_plan(predicted, changes or {}, path)
        is_changed = plan.setting != predicted.setting
        return _emit(trainer, plan, is_changed, _predicted_device(predicted))
    law = f"--way chooses among predicted settings, and {source} was measured."
    refuse_if(way is not None, law, "Omit --way.")
    recommendation = as_result(found, source)
    plan = _make_measured_plan(recommendation, changes or {}, path)
    is_changed = plan.setting != recommendation.setting
    return _emit(trainer, plan, is_changed, recommendation.device)


def read_found(result: ResultLike, name: str = "result") -> tuple[Any, str]:
    """The `result` that the argument `name` holds, as a Recommendation or parsed JSON, and what to
    call it in an error. Raises UsageError."""
    if isinstance(result, str | PathLike):
        return read_json(result, name)
    if isinstance(result, Recommendation | Mapping):
        return result, name
    if is_dataclass(result) or isinstance(result, Sequence):
        return files.to_json(result), name
    way_out = "Pass what planner.estimate, planner.advise or search.tune returned, or a path."
    raise UsageError(f"{shorten(result)} is no {name}.", way_out)


def _make_measured_plan(
    recommendation: Recommendation, changes: Mapping[str, Any], output: PurePath | None
) -> Plan:
    """The plan of a measured setting. Raises UnsupportedError if none was found."""
    if recommendation.setting is None or recommendation.evidence is None:
        verb = "fitted" if recommendation.num_probes else "was probed"
        raise UnsupportedError(
            f"there is nothing to emit: no setting of {recommendation.model.title} {verb} on "
            f"{recommendation.device.name}.",
            recommendation.advice or "Tune with a smaller batch, checkpointing or a smaller model.",
        )
    setting = _apply_changes(recommendation.setting, changes)
    return Plan(
        recommendation.model,
        setting,
        _origin_lines(recommendation, setting),
        device=recommendation.device.kind,
        allocator=recommendation.evidence.versions.get(RECORDED_AS),
        output=output,
        unit=recommendation.evidence.unit,
        measured_data=recommendation.feeding.data if recommendation.feeding else None,
    )


def _make_predicted_plan(
    predicted: Predicted, changes: Mapping[str, Any], output: PurePath | None
) -> Plan:
    """The plan of a predicted setting. Raises UnsupportedError if it is predicted not to fit."""
    setting = _apply_changes(predicted.setting, changes)
    if predicted.shortfall and setting == predicted.setting:
        law = f"{predicted.model.title} with this setting {predicted.shortfall}."
        way_out = "`planner advise` with the same model and GPU lists ways that fit."
        raise UnsupportedError(f"there is nothing to emit: {law}", way_out)
    overflow = ", whose upper end does not fit" if predicted.may_exceed else ""
    prediction = f"{predicted.summary} on {predicted.where}{overflow}"
    title = one_line(predicted.model.title)
    heading = [f"planner: {title}, predicted and not measured: {prediction}."]
    differences = setting.differences(predicted.setting)
    if differences:
        heading.append(_changes_line(differences, "predicted"))
    return Plan(
        predicted.model,
        setting,
        tuple(heading),
        allocator=predicted.allocator,
        output=output,
        unit=predicted.figures.unit if predicted.figures.is_task else None,
        warnings=(f"Predicted, not measured: {prediction}. `planner tune` measures.",),
        origin="estimate",
    )


def _predicted_device(predicted: Predicted) -> DeviceInfo | None:
    """The device of a prediction, as a probe on it would describe it."""
    gpu, budget = predicted.gpu, predicted.figures.budget_bytes
    if gpu is None:
        return DeviceInfo(kind="cuda", name="", total_bytes=budget) if budget is not None else None
    return DeviceInfo(
        kind="cuda",
        name=(*gpu.device_names, gpu.title)[0],
        total_bytes=gpu.memory_bytes,
        capability=gpu.capability,
        memory_cap_bytes=predicted.memory_bytes,
    )


def emit_setting(
    model: ModelLike,
    setting: SettingLike,
    target: str,
    *,
    device: DeviceInfo | None = None,
    output: str | PurePath | None = None,
) -> Emitted:
    """The files that train a model with a setting of your own, which nobody measured, for the
    trainer `target`.

    `model` and `setting` are as `planner.estimate` takes them. `device` is the device that it will
    train on; None is a CUDA device of any size. Raises the errors of `emit`.
    """
    parsed_model = read_model(model, {})
    plan = Plan(
        parsed_model,
        read_setting(setting, {}),
        (f"planner: {one_line(parsed_model.title)}, with a setting that was not measured.",),
        device=device.kind if device is not None else "cuda",
        output=PurePath(output) if output is not None else None,
    )
    return _emit(find_trainer(target), plan, False, device)


def read_result(path: str | PathLike[str]) -> Recommendation:
    """The recommendation in a file, or in a directory's `recommendation.json`.

    Raises UsageError: no such file, not JSON, another format version, or fields that do not fit.
    """
    data, source = read_json(path)
    return as_result(data, source)


def read_json(path: str | PathLike[str], name: str = "result") -> tuple[Any, str]:
    """The content of a result's file, which the argument `name` holds, and the path of that
    file."""
    file = files.named_path(path, name)
    if file.is_dir():
        file = file / files.TUNE_RESULT
    try:
        text = files.read_text(file, files.MAX_RESULT_BYTES)
    except files.NoFileError:
        raise UsageError(
            f"{file} does not exist.",
            "Name the folder of a tune, or the --json of 'planner estimate' or 'planner advise'.",
        ) from None
    try:
        return files.parse_json(text, str(file)), str(file)
    except UsageError as error:
        raise UsageError(
            error.message,
            "Run the command that wrote it again: `planner tune` goes on from its study.",
        ) from None


def nothing_fitted(source: str) -> UsageError:
    """The error for a recommendation without a setting."""
    law = f"{source} recommends nothing: no setting fitted."
    return UsageError(law, "Tune with a smaller batch, then name that folder.")


def as_result(data: object, source: str) -> Recommendation:
    """The recommendation in parsed JSON that `source` names. Raises UsageError."""
    if isinstance(data, Recommendation):
        return data
    if not isinstance(data, Mapping):
        law = f"{source} holds no recommendation: it is not a JSON object."
        raise UsageError(law, "Name the recommendation.json that 'planner tune' wrote.")
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


def _apply_changes(setting: TrainSetting, changes: Mapping[str, Any]) -> TrainSetting:
    """`setting` with `changes`. A change that turns off a parallelism, the compiler or adapters
    also resets the fields that belong to it."""
    if not changes:
        return setting
    dropped = set(COMPILED_FIELDS) if changes.get("compile") == "off" else set()
    if str(changes.get("lora_rank")) == "0":
        dropped.add("lora_targets")
    if "parallelism" in changes:
        dropped |= foreign_options(changes["parallelism"])
    values = setting.model_dump(exclude=dropped)
    return parse(TrainSetting, {**values, **changes}, "--set")


def _emit(trainer: Trainer, plan: Plan, is_changed: bool, device: DeviceInfo | None) -> Emitted:
    """The files of a plan. `is_changed`: its setting is not the one that was found."""
    title, library, is_named = trainer.title, trainer.library, trainer.can_name(plan)
    # A trainer that builds a Swin of its library refuses any other model by itself (`port_model`).
    builds_swin = library is not None and not trainer.trains_named
    if plan.is_task and trainer.name != TASK_TRAINER and not (is_named or builds_swin):
        raise _task_error(title, plan.model, device)
    model = plan.model
    if library and not is_named:
        model = faults.port_model(model, library, title)
    if device is not None:
        check_device_precision(device, plan.setting.precision)
    setting = plan.setting if is_named else plan.setting.with_recipe(isinstance(model, SwinConfig))
    setting = faults.parallel_setting(trainer, setting)
    planned = replace(plan, model=model, setting=setting)
    refuse(title, [
        *faults.setting_faults(model, plan.setting),
        *faults.parallel_faults(trainer, planned, TRAINERS.values()),
        *faults.word_faults(trainer, planned),
        *trainer.faults(planned),
    ])  # fmt: skip
    reasons = []
    if model is not plan.model:
        assert isinstance(model, SwinConfig)
        probed = one_line(plan.model.title)
        reasons.append(f"the setting was found for {probed}, and this is {model.library}'s Swin")
    if is_changed:
        reasons.append(f"the setting was changed after the {plan.origin}")
    reasons += faults.parallel_reasons(trainer, plan.setting, setting)
    unmeasured = _describe_unmeasured(model, planned, device, reasons) if reasons else ()
    loader = loader_warnings(trainer, planned)
    heading = (*plan.heading, *unmeasured, *loader_heading(planned), *loader)
    written = trainer.write(replace(planned, heading=heading))
    return Emitted(
        target=trainer.name,
        filename=trainer.filename,
        text=written.text,
        launch=written.command,
        warnings=(*plan.warnings, *unmeasured, *loader, *written.notes),
        modules=written.modules,
    )


def _task_error(title: str, model: Model, device: DeviceInfo | None) -> UnsupportedError:
    """The error for a model with a step of its own, or of which nobody knows whether it has one."""
    name = model.title
    law = f"{title} is written for images -> logits, and {name} has a step of its own."
    way_out = f"Use --for {TASK_TRAINER}, whose script trains any task."
    if isinstance(model, FactoryModel) and device is None:
        law = f"{title} takes images -> logits, and no estimate tells whether {name} does."
        way_out = f"Run 'planner tune {name}' first, which does, or use --for {TASK_TRAINER}."
    return UnsupportedError(law, way_out)


def _describe_unmeasured(
    model: Model, plan: Plan, device: DeviceInfo | None, reasons: list[str]
) -> tuple[str, ...]:
    """A warning: why the setting was not measured, and its estimated memory. Raises
    UnsupportedError where it cannot fit."""
    why = "; ".join(reasons)
    if not isinstance(model, SwinConfig):
        return (f"Not measured: {why}.",)
    try:
        estimated = _estimate(model, plan, device)
    except UnsupportedError as error:
        return (f"Not measured, nor estimated: {why}; {error.message}",)
    total = format_bytes(estimated.device_total_bytes)
    if estimated.fits is False:
        raise UnsupportedError(
            f"{why}: it is estimated to take {total} on a CUDA device, which does not fit.",
            "Emit with a smaller --set batch_size=N (and a larger accumulate), "
            f"or tune {model.library}'s own model.",
        )
    return (f"Not measured: {why}. It is estimated to take {total} on a CUDA device.",)


def _estimate(model: SwinConfig, plan: Plan, device: DeviceInfo | None) -> Estimate:
    from planner.estimation.estimate import estimate
    from planner.machine.hardware import recognise_gpu

    allocator = plan.allocator or AllocatorConfig()
    if device is None:
        return estimate(model, plan.setting, allocator=allocator)
    gpu = recognise_gpu(device.name, device.total_bytes) if device.kind == "cuda" else None
    budget = device.memory_cap_bytes or device.total_bytes
    return estimate(model, plan.setting, gpu=gpu, memory_bytes=budget, allocator=allocator)


def _origin_lines(recommendation: Recommendation, setting: TrainSetting) -> tuple[str, ...]:
    """The probe that the setting comes from, as lines of a comment."""
    evidence = recommendation.evidence
    assert evidence is not None
    speed = evidence.images_per_second
    rate = f"{speed:.1f} {one_line(evidence.counts)}/s" if speed else "no rate"
    peak = evidence.peak_allocated_bytes
    memory = f", {format_bytes(peak)} allocated at the peak" if peak is not None else ""
    cap = recommendation.device.memory_cap_bytes
    emulated = f" (capped at {format_bytes(cap)}: an emulation)" if cap is not None else ""
    model, device = one_line(recommendation.model.title), one_line(recommendation.device.title)
    torch = one_line(evidence.versions.get("torch", "unknown"))
    if recommendation.device.emulated:
        rate += " (predicted, not measured)"
    lines = [
        f"planner: {model} on {device}{emulated}, probed {one_line(evidence.date)}:",
        f"{rate}{memory}, torch {torch}.",
    ]
    differences = setting.differences(recommendation.setting) if recommendation.setting else {}
    if differences:
        lines.append(_changes_line(differences, "measured"))
    return tuple(lines)


def _changes_line(differences: Mapping[str, Any], basis: str) -> str:
    changes = ", ".join(f"{field}={value}" for field, value in differences.items())
    return f"Changed since, and so not what was {basis}: {changes}."
