"""A setting in a trainer's own words: `emit` writes what `planner tune` found for one trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from planner.callable_module import make_callable
from planner.emit.counterpart import as_library, setting_faults
from planner.emit.plan import Emitted, Model, Plan, refuse
from planner.errors import UnsupportedError, UsageError, unknown_name
from planner.files import MAX_RESULT_BYTES, NoFileError, parse_json, read_text
from planner.schema import DeviceInfo, FactoryModel, SwinConfig, TrainSetting, parse
from planner.schema.result import RESULT_FORMAT, Recommendation
from planner.units import format_bytes

__all__ = ["TARGETS", "Emitted", "emit", "emit_setting", "read_result"]

TARGETS = (
    "timm", "transformers", "accelerate", "lightning", "microsoft", "deepspeed", "mmengine",
    "pytorch",
)  # fmt: skip
RESULT_FILE = "recommendation.json"


_SEVERAL_DEVICES = (
    "several devices: DDP may keep one more copy of the gradients, in its buckets, than one "
    "device's probe or estimate holds."
)
_CHANGED = "the setting was changed after it was probed"
_WRAPPED = "trains under DDP on one device too, and the gradient buckets it keeps are counted"


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
) -> Emitted:
    """The recommended setting for `target`, one of `TARGETS`.

    `result` is a Recommendation, its JSON as a mapping, or the path of `recommendation.json` or of
    the directory that holds it. `changes` are fields of TrainSetting to set otherwise than probed.
    A trainer of another library than the one probed trains that library's counterpart of the
    model: it is estimated anew (`estimator`), and the file says that it was not measured.

    Raises UsageError (unknown target, unreadable result, a bad change) and UnsupportedError
    (nothing was found to fit, the trainer cannot express the setting, or it would not fit).
    """
    writer = _writer(target)
    found = result if isinstance(result, Recommendation) else _parse_result(result)
    if found.setting is None or found.evidence is None:
        raise UnsupportedError(
            f"there is nothing to emit: no setting of {found.model.title} fitted on "
            f"{found.device.name}.",
            found.advice or "Tune with a smaller batch, checkpointing or a smaller model.",
        )
    setting = _changed(found.setting, changes or {})
    measured = (setting.differences(found.setting) or None) is None
    return _write(
        writer, target, found.model, setting, _origin(found, setting), measured, found.device,
        estimator,
    )  # fmt: skip


def emit_setting(
    model: SwinConfig | FactoryModel,
    setting: TrainSetting,
    target: str,
    *,
    estimator: Estimator | None = None,
) -> Emitted:
    """A model and a setting of your own, which nobody measured, for `target`. Raises as `emit`."""
    origin = (f"planner: {model.title}, with a setting that was not measured.",)
    return _write(_writer(target), target, model, setting, origin, True, None, estimator)


def read_result(path: str | Path) -> Recommendation:
    """The recommendation in a file, or in a directory's `recommendation.json`.

    Raises UsageError: no such file, not JSON, another format version, or fields that do not fit.
    """
    file = Path(path)
    if file.is_dir():
        file = file / RESULT_FILE
    try:
        text = read_text(file, MAX_RESULT_BYTES)
    except NoFileError:
        raise UsageError(
            f"there is no result at {file}.",
            f"`planner tune MODEL --output DIR` leaves {RESULT_FILE} in DIR.",
        ) from None
    try:
        data = parse_json(text, str(file))
    except UsageError as error:
        raise UsageError(
            error.message,
            "Run the same `planner tune` again: it goes on from its study and rewrites the file.",
        ) from None
    return _as_result(data, str(file))


def _parse_result(result: Mapping[str, Any] | str | Path) -> Recommendation:
    return read_result(result) if isinstance(result, str | Path) else _as_result(result, "result")


def _as_result(data: object, source: str) -> Recommendation:
    if not isinstance(data, Mapping):
        raise UsageError(f"{source} holds no recommendation: a JSON object was expected.")
    version = data.get("format")
    if version != RESULT_FORMAT:
        raise UsageError(
            f"{source} has result format {version!r}, and this planner reads {RESULT_FORMAT}.",
            "Run `planner tune` again with this version, or emit with the one that wrote it.",
        )
    return parse(Recommendation, data, source)


def _changed(setting: TrainSetting, changes: Mapping[str, Any]) -> TrainSetting:
    return parse(TrainSetting, {**setting.model_dump(), **changes}, "--set") if changes else setting


def _writer(target: str) -> Any:
    if target not in TARGETS:
        raise unknown_name("trainer", target, TARGETS, f"Trainers: {', '.join(TARGETS)}.")
    return import_module(f"planner.emit.{target}")


def _write(
    writer: Any,
    target: str,
    model: Model,
    setting: TrainSetting,
    origin: tuple[str, ...],
    measured: bool,
    device: DeviceInfo | None,
    estimator: Estimator | None,
) -> Emitted:
    """`writer` is a trainer's file: LIBRARY (None where it trains any model), TITLE, refusals() and
    write(), and WRAPS_IN_DDP where it does so on one device too."""
    title: str = writer.TITLE
    trained = as_library(model, writer.LIBRARY, title) if writer.LIBRARY else model
    plan = Plan(trained, setting, origin)
    refuse(title, [*setting_faults(trained, setting), *writer.refusals(plan)])
    warnings: list[str] = []
    wrapped: bool = getattr(writer, "WRAPS_IN_DDP", False)
    reasons = [
        *([_moved(model, trained)] if trained is not model else []),
        *([] if measured or trained is not model else [_CHANGED]),
        *([f"{title} {_WRAPPED}"] if wrapped else []),
    ]
    if isinstance(trained, SwinConfig) and reasons:
        run = setting.model_copy(update={"parallelism": "ddp"}) if wrapped else setting
        warnings.append(_judge(trained, run, device, "; ".join(reasons), estimator))
    if setting.world_size > 1 and not wrapped:
        warnings.append(_SEVERAL_DEVICES)
    emitted = writer.write(Plan(trained, setting, (*origin, *warnings), tuple(warnings)))
    assert isinstance(emitted, Emitted)
    assert emitted.target == target
    return emitted


def _moved(probed: Model, trained: Model) -> str:
    assert isinstance(trained, SwinConfig)
    return f"the setting is {probed.title}'s, and this is the Swin of {trained.library}"


def _judge(
    model: SwinConfig,
    setting: TrainSetting,
    device: DeviceInfo | None,
    why: str,
    estimator: Estimator | None,
) -> str:
    """Says what was not measured and what it is estimated to take. Raises where it cannot fit."""
    estimate = (estimator or _estimate)(model, setting, device)
    total = format_bytes(estimate.device_total_bytes)
    if estimate.fits is False:
        raise UnsupportedError(
            f"{why}: it is estimated to take {total} on a CUDA device, which does not fit.",
            "Emit with a smaller --set batch_size=N (and a larger accumulate), "
            f"or tune {model.library}'s own model.",
        )
    return f"not measured: {why}; it is estimated to take {total} on a CUDA device."


def _estimate(model: SwinConfig, setting: TrainSetting, device: DeviceInfo | None) -> Judged:
    from planner.estimate import estimate
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
    lines = [
        f"planner: {found.model.title} on {found.device.name}{emulated}, probed {evidence.date}:",
        f"{rate}{memory}, torch {evidence.versions.get('torch', 'unknown')}.",
    ]
    changed = setting.differences(found.setting) if found.setting else {}
    if changed:
        said = ", ".join(f"{field}={value}" for field, value in changed.items())
        lines.append(f"Changed since, and so not what was measured: {said}.")
    return tuple(lines)


make_callable(__name__, emit)
