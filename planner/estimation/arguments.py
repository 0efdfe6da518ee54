"""The arguments of the Python interface, read in each form in which people naturally write them.

Every reader raises UsageError where a value has no such form.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

from planner.core.errors import UsageError, alternatives, find_word, nearest, refuse_if, shorten
from planner.core.schema import FactoryModel, Model, NamedModel, SwinConfig, TrainSetting, parse
from planner.core.schema.record import Recommendation
from planner.core.units import check_memory, parse_bytes
from planner.libraries.names import override_named, override_swin, resolve_model
from planner.machine.hardware import find_gpu
from planner.machine.hardware.gpu import Gpu
from planner.memory.allocator_config import (
    AllocatorConfig,
    environment_allocator,
    parse_allocator_config,
)
from planner.recording.recordings import forget_changed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ModelLike = str | PathLike[str] | Mapping[str, Any] | Model
SettingLike = Mapping[str, Any] | TrainSetting
# A Recommendation, an Estimate or an Advice; their JSON; or the path of a file or a folder of one.
ResultLike: TypeAlias = (
    "Recommendation | DataclassInstance | Mapping[str, Any] | Sequence[Any] | str | PathLike[str]"
)
# The fields of every kind of model: a Swin's first, then what others have besides.
MODEL_FIELDS = tuple(
    dict.fromkeys((*SwinConfig.model_fields, *NamedModel.model_fields, *FactoryModel.model_fields))
)
ALL_FIELDS = (*MODEL_FIELDS, *TrainSetting.model_fields)
# The command line's names for some keywords.
_KEYWORDS = {"memory": "memory_bytes={}", "gpus": "world_size={}, parallelism='ddp'"}
MAX_NEAR = 5  # fields that an unknown one may have meant


@dataclass(frozen=True)
class Target:
    """What a step is estimated for.

    - `gpu`: None where none was named.
    - `memory_bytes`: the memory to fit into; None for all that the GPU has.
    - `allocator`: the caching allocator's options; None for torch's defaults.
    - `link`: what joins several GPUs, as `planner estimate --link` takes it; None for what the GPU
      usually has.
    - `recorded`: a step that runs on shapes is recorded all the same.
    """

    gpu: Gpu | None = None
    memory_bytes: int | None = None
    allocator: AllocatorConfig | None = None
    link: str | None = None
    recorded: bool = False

    @property
    def budget_bytes(self) -> int | None:
        """The memory to fit into; None where neither that nor a GPU was named."""
        if self.memory_bytes is None and self.gpu is not None:
            return self.gpu.memory_bytes
        return self.memory_bytes


NO_TARGET = Target()  # nothing was named


def read_model(model: ModelLike, overrides: Mapping[str, Any]) -> Model:
    """A model from a name, the path of a file, its fields, or a model."""
    read = _read_model(model, overrides)
    if isinstance(read, FactoryModel):
        forget_changed(read)
    return read


def _read_model(model: ModelLike, overrides: Mapping[str, Any]) -> Model:
    if isinstance(model, str | PathLike):
        return resolve_model(model, overrides)
    if isinstance(model, SwinConfig):
        return override_swin(model, overrides)
    if isinstance(model, NamedModel):
        return override_named(model, overrides)
    if isinstance(model, FactoryModel):
        return parse(FactoryModel, {**model.model_dump(), **overrides}, model.title)
    if isinstance(model, Mapping) and "task" in model:
        return parse(NamedModel, {**model, **overrides}, "the model")
    if isinstance(model, Mapping):
        return override_swin(parse(SwinConfig, {**model, **overrides}, "the model"), {})
    law = "a model is LIBRARY:NAME, package.module:factory, a file, a SwinConfig or its fields"
    raise UsageError(f"{law}, and {shorten(model)} is not.", "List names with 'planner models'.")


def read_setting(
    setting: SettingLike | None,
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
) -> TrainSetting:
    """A setting from a setting with `overrides`, or from fields over `defaults`. Several devices
    without a parallelism run ddp, as on the command line."""
    if setting is not None and not isinstance(setting, TrainSetting | Mapping):
        law = f"a setting is a TrainSetting or a mapping of its fields, not {shorten(setting)}."
        raise UsageError(law, 'For example {"batch_size": 64, "precision": "bf16"}.')
    fields = dict(overrides or {})
    if isinstance(setting, TrainSetting):
        if not fields:
            return setting
        base, named = setting.model_dump(), setting.model_fields_set
    else:
        base, named = dict(defaults), set()
        fields = {**(setting or {}), **fields}
    if str(fields.get("world_size", 1)) != "1" and "parallelism" not in named:
        fields.setdefault("parallelism", "ddp")
    return parse(TrainSetting, {**base, **fields}, "the setting")


def read_gpu(gpu: str | Gpu | None) -> Gpu | None:
    """A GPU from a name of the catalogue, or from a GPU."""
    if gpu is None or isinstance(gpu, Gpu):
        return gpu
    if isinstance(gpu, str):
        return find_gpu(gpu)
    raise UsageError(
        f"a GPU is a name or a Gpu, not {shorten(gpu)}.", "'planner gpus' lists names."
    )


def read_memory(memory: int | str | None) -> int | None:
    """Bytes from a number of bytes, or from a text as 24GiB."""
    if memory is None:
        return None
    return parse_bytes(memory) if isinstance(memory, str) else check_memory(memory)


def read_allocator(allocator: str | AllocatorConfig | None) -> AllocatorConfig | None:
    """Options from options, or from a text as expandable_segments:True."""
    if allocator is None or isinstance(allocator, AllocatorConfig):
        return allocator
    if isinstance(allocator, str):
        return parse_allocator_config(allocator)
    law = f"an allocator's options are text, and {shorten(allocator)} is not."
    raise UsageError(law, 'For example "expandable_segments:True".')


def allocator_here(allocator: str | AllocatorConfig | None) -> AllocatorConfig | None:
    """The options that were given, else those that torch would find in this environment."""
    return environment_allocator(os.environ) if allocator is None else read_allocator(allocator)


def read_target(
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    allocator: str | AllocatorConfig | None = None,
    link: str | None = None,
    recorded: bool = False,
) -> Target:
    """The target that these arguments of `estimate` mean."""
    memory = read_memory(memory_bytes)
    return Target(read_gpu(gpu), memory, allocator_here(allocator), link, recorded)


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raises UsageError for a field that neither a model nor a setting has."""
    for field, value in fields.items():
        if field in _KEYWORDS:
            raise UsageError(
                f"{field!r}: no such field of a model or a setting.",
                f"Write {_KEYWORDS[field].format(shorten(value))}.",
            )
        if field not in ALL_FIELDS:
            raise unknown_field(field, value)


def unknown_field(field: str, value: object, before: str = "") -> UsageError:
    """The error for a field, set to `value`, that neither a model nor a setting has. It names our
    word for another library's, typed with `before` it; else the nearest fields."""
    message = f"{shorten(field)}: no such field of a model or a setting."
    word = find_word(field)
    if word is not None:
        return UsageError(f"{message} It is a word of {word.source}.", word.written(value, before))
    near = nearest(field, ALL_FIELDS, count=MAX_NEAR)
    hint = f" Did you mean {alternatives(map(repr, near))}?" if near else ""
    return UsageError(message + hint, "'planner estimate MODEL --json' prints all fields of both.")


def split_images(global_batch: int, gpus: int, accumulate: int, has_batch: bool = False) -> int:
    """The images of each micro-batch on each GPU. Raises UsageError where they do not divide,
    and where a batch size was typed too (`has_batch`)."""
    law = "--batch-size is of each GPU, and --global-batch of all together."
    refuse_if(has_batch, law, "Give one of the two.")
    parts = gpus * accumulate
    if min(global_batch, gpus, accumulate) < 1 or global_batch % parts:
        raise UsageError(
            f"{global_batch} images of a step cannot be split into {parts} equal parts "
            f"({gpus} GPUs × {accumulate} micro-batches).",
            f"Choose a multiple of {max(parts, 1)}.",
        )
    return global_batch // parts
