"""What a search was asked: as its result keeps it, and as the command that asks the same again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from planner.advice.flags import field_flags
from planner.core.errors import UsageError
from planner.core.schema import FactoryModel, Model, SwinConfig, TrainSetting, parse
from planner.core.schema.distribution import Distribution
from planner.core.schema.validation import Option, declared_options
from planner.estimation.kept import Predicted
from search.loop.axes import AXES, implementations
from search.loop.options import SearchKeywords, SearchOptions, start_text

_MODEL_OPTIONS = {n: said.flag_of(n) for n, said in declared_options(SwinConfig).items()}


def kept_options(options: SearchOptions) -> dict[str, JsonValue]:
    """The options that are not the defaults, as keywords of `tune` that JSON can hold. A password
    in the storage's address is not kept."""
    kept: dict[str, Any] = {
        f.name: getattr(options, f.name)
        for f in fields(options)
        if getattr(options, f.name) != getattr(_DEFAULTS, f.name)
    }
    kept["base"] = _held(options)
    if options.start is not None:
        kept["start"] = start_text(options.start)
    if options.storage is not None:
        from search.loop.storage import hidden_password  # imports optuna, which readers need not

        kept["storage"] = hidden_password(options.storage)
    found: dict[str, JsonValue] = to_jsonable_python(kept)
    return found


def read_options(kept: Mapping[str, Any]) -> SearchOptions:
    """The options that a result keeps. Raises UsageError for what is none of this planner's."""
    read: Any = kept
    try:
        return SearchOptions.of(read)
    except UsageError as error:
        raise UsageError(f"the search's options are not of this planner: {error.message}") from None


def begin_at(found: Predicted, typed: SearchKeywords, held: Mapping[str, str]) -> dict[str, Any]:
    """The keywords of a search that begins at a predicted setting; those that were `typed` win, and
    what is `held` of every setting. Raises UsageError."""
    setting = found.setting.without_recipe(isinstance(found.model, SwinConfig))
    sized = typed["batch_size"] is not None or "global_batch" in typed
    share = None if sized or "accumulate" in held else found.share
    gone = {*AXES, "batch_size", *({"accumulate"} if sized or share else ())}
    if "gpus" in typed or "world_size" in held:  # spread as it is typed
        gone |= set(Distribution.model_fields)
    base = {**setting.model_dump(exclude=gone), **held}
    if setting.optimizer_implementation in ("foreach", "fused"):
        base["optimizer"] = setting.optimizer_family
    limits = {
        "memory_bytes": found.memory_bytes,
        "allocator": found.allocator,
        "global_batch": share and share * setting.world_size,
        "start": None if found.lacks else setting.model_dump(include={*AXES, "batch_size"}),
    }
    given = {name: value for name, value in limits.items() if value is not None}
    return {**given, **typed, "base": parse(TrainSetting, base, found.source)}


def tune_command(model: str, options: SearchOptions, more: Iterable[str] = ()) -> str:
    """A line for a shell: `planner tune MODEL …` with the options that are not the defaults, and
    `more` of the model.

    `base.batch_size` has no option: it only says which batch a learning rate was tuned for."""
    words = ["planner", "tune", *([model] if model else []), *more, *_setting_flags(options)]
    for name, said in declared_options(SearchOptions).items():
        value = getattr(options, name)
        if name == "gpus" and value is None and options.base.world_size != 1:
            value = options.base.world_size  # what `base` says of devices
        if said.text and value != getattr(_DEFAULTS, name):
            words += _flag(name, said, value)
    return shlex.join(words)


def model_flags(model: Model) -> list[str]:
    """The options that make what a model's title names into `model`, where that is no Swin of ours:
    all sizes of a library's own, whose defaults only the library knows."""
    if isinstance(model, SwinConfig):
        return []
    default: Mapping[str, Any] = {}
    if isinstance(model, FactoryModel):
        default = FactoryModel(factory=model.factory).model_dump()
    words: list[str] = []
    for field in ("image_size", "in_channels", "num_classes", "num_frames", "sequence_length"):
        value = getattr(model, field, None)
        if value is not None and value != default.get(field):
            values = dict.fromkeys(value) if isinstance(value, tuple) else (value,)
            words += field_flags(field, values, _MODEL_OPTIONS)
    return words


def _flag(name: str, said: Option, value: object) -> list[str]:
    flag = said.flag_of(name)
    return [flag] if isinstance(value, bool) else [flag, said.written(value)]


def _setting_flags(options: SearchOptions) -> list[str]:
    """What is held of every setting, and the values that axes are restricted to."""
    values: dict[str, tuple[object, ...]] = {}
    if options.batch_size is not None:
        values["batch_size"] = options.batch_size
    for field, value in _held(options).items():
        if field not in ("batch_size", "world_size"):
            values[field] = implementations(str(value)) if field == "optimizer" else (value,)
    if options.gpus is not None and values.get("parallelism") == ("ddp",):
        del values["parallelism"]  # what --gpus means by itself
    values |= {field: tuple(given) for field, given in (options.restrict or {}).items()}
    return [word for field, given in values.items() for word in field_flags(field, given)]


def _held(options: SearchOptions) -> dict[str, object]:
    """The fields of `base` that hold for every probe, where they are not the defaults."""
    found = options.base.differences(TrainSetting())
    return {f: v for f, v in found.items() if f == "optimizer" or f not in AXES}


_DEFAULTS = SearchOptions()
