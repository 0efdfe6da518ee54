"""A setting in words, the same in every table and sentence."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cache

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.core.schema.setting import OWN_OPTIMIZER

ALWAYS_SAID = ("batch_size", "precision", "optimizer", "checkpointing")
_NAMED_BY_VALUE = ("precision", "optimizer", "loss")
_NAMES = {"batch_size": "batch", "clip_grad": "gradient clipping"}


def describe_setting(
    setting: TrainSetting, model: Model | None = None, without: Container[str] = ()
) -> str:
    """`batch 64, bf16, adamw, checkpointing none, accumulate 4`: what is always worth saying, then
    what differs from the default and the recipe of `model`; where no model is at hand, from that of
    a Swin and of others. Fields in `without` are said elsewhere."""
    for of_swin in (True, False) if model is None else (isinstance(model, SwinConfig),):
        setting = setting.without_recipe(of_swin)
    other = setting.differences(_default())
    always = {field: getattr(setting, field) for field in ALWAYS_SAID}
    return in_words({f: v for f, v in {**always, **other}.items() if f not in without})


@cache
def _default() -> TrainSetting:
    return TrainSetting()


def describe_changes(setting: TrainSetting, against: TrainSetting) -> str:
    """What makes a setting another than `against`: `batch 32, compile default`."""
    return in_words(setting.differences(against)) or "the same setting"


def value_text(value: object) -> str:
    """A field's value: `yes` and `no` for what is on and off."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def in_words(fields: Mapping[str, object]) -> str:
    """`batch 32, accumulate 8, adamw-fused`: each field's name and value; only its value where that
    says what it is."""
    return ", ".join(_said(field, value) for field, value in fields.items())


def _said(field: str, value: object) -> str:
    if field in _NAMED_BY_VALUE:
        return "own optimizer" if value == OWN_OPTIMIZER else value_text(value)
    if field == "allocator" and value == "expandable_segments:True":
        return "expandable segments"
    if field == "world_size":
        return f"on each of {value} GPUs" if value != 1 else "on 1 GPU"
    name = _NAMES.get(field, field.replace("_", " "))
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value}"
