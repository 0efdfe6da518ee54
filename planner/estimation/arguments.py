"""What the Python interface takes: the forms in which people naturally say a thing, made into ours.

All raise UsageError where a value has no such form.
"""

import os
from collections.abc import Mapping
from os import PathLike
from typing import Any

from planner.core.errors import UsageError, alternatives, find_word, nearest, refuse_if, shorten
from planner.core.schema import FactoryModel, Model, NamedModel, SwinConfig, TrainSetting, parse
from planner.core.units import check_memory, parse_bytes
from planner.libraries.names import override, override_named, resolve_model
from planner.machine.hardware import find_gpu
from planner.machine.hardware.gpu import Gpu
from planner.memory.allocator_config import (
    AllocatorConfig,
    environment_allocator,
    parse_allocator_config,
)
from planner.recording.recordings import forget_changed

ModelLike = str | PathLike[str] | Mapping[str, Any] | Model
SettingLike = Mapping[str, Any] | TrainSetting
# Of every kind of model: those of a Swin first, then what others have besides.
MODEL_FIELDS = tuple(
    dict.fromkeys((*SwinConfig.model_fields, *NamedModel.model_fields, *FactoryModel.model_fields))
)
ALL_FIELDS = (*MODEL_FIELDS, *TrainSetting.model_fields)
# What the command line calls otherwise.
_KEYWORDS = {"memory": "memory_bytes={}", "gpus": "world_size={}, parallelism='ddp'"}
MAX_NEAR = 5  # fields that an unknown one may have meant


def read_model(model: ModelLike, overrides: Mapping[str, Any]) -> Model:
    """From a name, a file's path, the fields of a SwinConfig or a NamedModel, or a model."""
    found = _read_model(model, overrides)
    if isinstance(found, FactoryModel):
        forget_changed(found)
    return found


def _read_model(model: ModelLike, overrides: Mapping[str, Any]) -> Model:
    if isinstance(model, str | PathLike):
        return resolve_model(model, overrides)
    if isinstance(model, SwinConfig):
        return override(model, overrides)
    if isinstance(model, NamedModel):
        return override_named(model, overrides)
    if isinstance(model, FactoryModel):
        return parse(FactoryModel, {**model.model_dump(), **overrides}, model.title)
    if isinstance(model, Mapping) and "task" in model:
        return parse(NamedModel, {**model, **overrides}, "the model")
    if isinstance(model, Mapping):
        return override(parse(SwinConfig, {**model, **overrides}, "the model"), {})
    raise UsageError(
        "a model is LIBRARY:NAME, package.module:factory, a file, a SwinConfig or its fields, and "
        f"{shorten(model)} is not."
    )


def read_setting(
    setting: SettingLike | None,
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
) -> TrainSetting:
    """From a setting with `overrides`, or from its fields over `defaults`. Several devices that
    come without a parallelism run ddp, as on the command line."""
    if setting is not None and not isinstance(setting, TrainSetting | Mapping):
        raise UsageError(
            f"a setting is a TrainSetting or a mapping of its fields, not {shorten(setting)}."
        )
    fields = dict(overrides or {})
    if isinstance(setting, TrainSetting):
        if not fields:
            return setting
        base, said = setting.model_dump(), setting.model_fields_set
    else:
        base, said = dict(defaults), set()
        fields = {**(setting or {}), **fields}
    if str(fields.get("world_size", 1)) != "1" and "parallelism" not in said:
        fields.setdefault("parallelism", "ddp")
    return parse(TrainSetting, {**base, **fields}, "the setting")


def read_gpu(gpu: str | Gpu | None) -> Gpu | None:
    """From a name of the catalogue, or a GPU."""
    if gpu is None or isinstance(gpu, Gpu):
        return gpu
    if isinstance(gpu, str):
        return find_gpu(gpu)
    raise UsageError(f"a GPU is a name of 'planner gpus' or a Gpu, and {shorten(gpu)} is not.")


def read_memory(memory: int | str | None) -> int | None:
    """From bytes, or a text as 24GiB."""
    if memory is None:
        return None
    return parse_bytes(memory) if isinstance(memory, str) else check_memory(memory)


def read_allocator(allocator: str | AllocatorConfig | None) -> AllocatorConfig | None:
    """From options, or a text as expandable_segments:True."""
    if allocator is None or isinstance(allocator, AllocatorConfig):
        return allocator
    if isinstance(allocator, str):
        return parse_allocator_config(allocator)
    raise UsageError(f"an allocator's options are text, and {shorten(allocator)} is not.")


def allocator_here(allocator: str | AllocatorConfig | None) -> AllocatorConfig | None:
    """Those that were given, else those that torch would find in this environment."""
    return environment_allocator(os.environ) if allocator is None else read_allocator(allocator)


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raises UsageError for what is a field of neither a model nor a setting."""
    for field, value in fields.items():
        if field in _KEYWORDS:
            raise UsageError(
                f"{field!r}: no such field of a model or a setting.",
                f"Write {_KEYWORDS[field].format(shorten(value))}.",
            )
        if field not in ALL_FIELDS:
            raise unknown_field(field, value)


def unknown_field(field: str, value: object, before: str = "") -> UsageError:
    """The error for a field of neither a model nor a setting that was set to `value`: our word for
    another library's, which is typed with `before` it, else the nearest fields."""
    message = f"{shorten(field)}: no such field of a model or a setting."
    word = find_word(field)
    if word is not None:
        return UsageError(f"{message} It is a word of {word.source}.", word.written(value, before))
    near = nearest(field, ALL_FIELDS, count=MAX_NEAR)
    hint = f" Did you mean {alternatives(map(repr, near))}?" if near else ""
    return UsageError(message + hint, "'planner estimate MODEL --json' prints all fields of both.")


def share_of(global_batch: int, devices: int, micro_batches: int, is_sized: bool = False) -> int:
    """The images of each micro-batch on each device. Raises UsageError where that is no number, and
    where it was said besides."""
    law = "--batch-size is of each GPU, and --global-batch of all together."
    refuse_if(is_sized, law, "Give one of the two.")
    parts = devices * micro_batches
    if min(global_batch, devices, micro_batches) < 1 or global_batch % parts:
        raise UsageError(
            f"{global_batch} images of a step cannot be split into {parts} equal parts "
            f"({devices} GPUs × {micro_batches} micro-batches).",
            f"Choose a multiple of {max(parts, 1)}.",
        )
    return global_batch // parts
