"""What a search may vary: fields of a setting, and the values that each may take on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Self, TypeVar

from pydantic import model_validator

from planner.core.errors import UnsupportedError, UsageError, alternatives, shorten, unknown_name
from planner.core.schema import DeviceInfo, Model, SwinConfig, TrainSetting, parse
from planner.core.schema.setting import FUSED_FAMILIES, OWN_OPTIMIZER
from planner.libraries.limits import attention_limit
from planner.libraries.registry import find_library
from planner.machine.hardware.precisions import device_precisions

AXES = ("precision", "checkpointing", "compile", "attention", "optimizer")  # of every search
# Of every setting of a search, and no axis of it.
HELD = {
    "accumulate": "With --global-batch it follows from the micro-batch.",
    "world_size": "A study is of one world: choose it with --gpus.",
    "nodes": "A study is of the GPUs of one machine: choose them with --gpus.",
}
# Any other field, where it is asked for; of the batch a search has its own ladder.
SEARCHABLE = (
    *AXES, *(f for f in TrainSetting.model_fields if f not in (*AXES, *HELD, "batch_size")),
)  # fmt: skip
MAX_CHOSEN_STAGES = 2
# A search ends when no probe is expected to gain more than that share: a judgement. Until all of
# them together gain less, 24 simulated devices took 20 probes for 11, and lost 0.7% for 0.9%.
TOLERANCE = 0.01
# Checkpointing between none and all, which keeps more and recomputes less: tried by default where
# memory binds, and at the precisions that can win there.
PARTIAL_CHECKPOINTINGS = ("blocks:every-2", "selective")
REDUCED_PRECISIONS = ("bf16", "fp16")
Value = str | int | float
Restriction = Mapping[str, Sequence[Value]]
Choices = Mapping[str, tuple[Value, ...]]
T = TypeVar("T")


class _Alone(TrainSetting):
    """A field by itself. What it needs of others is seen where the setting is whole."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        return self


def read_values(field: str, given: object) -> tuple[Value, ...]:
    """The values that an axis may take, as the setting has them. Raises UsageError."""
    if field in HELD:
        raise held_error(field)
    if field not in SEARCHABLE:
        raise unknown_name("axis", field, SEARCHABLE, f"One of {', '.join(SEARCHABLE)}.")
    values = (given,) if isinstance(given, str | int | float) else given
    if not isinstance(values, Sequence) or not values:
        raise UsageError(
            f"restrict names the values {field} may take, and {shorten(given)} names none.",
            "Omit the axis to search all of it.",
        )
    read = (getattr(parse(_Alone, {field: v}, "the search"), field) for v in values)
    return in_order(read)


def held_error(field: str) -> UsageError:
    return UsageError(f"{field} holds for every probe and takes one value.", HELD[field])


def axis_choices(
    model: Model, device: DeviceInfo, base: TrainSetting, restrict: Restriction,
    start: TrainSetting | None = None,
) -> dict[str, tuple[Value, ...]]:  # fmt: skip
    """The values of each axis that this model has on this device, narrowed to those asked for; and
    those of every other field that was asked for. An axis that nobody narrowed also has the value
    of `start`, where the device and the library have it.

    fp16 is searched only where it is asked for, or the device has no bf16: it is as fast as bf16,
    needs a GradScaler and overflows.
    """
    offered: dict[str, tuple[Value, ...]] = {
        "precision": device_precisions(device),
        "checkpointing": _checkpointings(model, device),
        "compile": device_compile_modes(device),
        "attention": _attentions(model),
        "optimizer": implementations(base.optimizer),
    }
    asked = {axis: restrict[axis] for axis in AXES if axis in restrict}
    chosen = {axis: _narrow(axis, offered[axis], asked.get(axis), device) for axis in AXES}
    for axis in ("checkpointing", "attention"):
        for value in asked.get(axis, ()):
            _check_library(model, axis, value)
    for value in chosen["optimizer"] if base.optimizer != OWN_OPTIMIZER else ():
        parse(TrainSetting, {"optimizer": value}, "the search").check_optimizer()
    for axis in AXES if start is not None else ():
        value = getattr(start, axis)
        if axis not in asked and value not in chosen[axis]:
            with suppress(UnsupportedError):
                _check_library(model, axis, value)
                chosen[axis] = (*chosen[axis], *_narrow(axis, offered[axis], [value], device))
    others = {field: in_order(values) for field, values in restrict.items() if field not in AXES}
    return {**chosen, **others}


def is_worth_trying(setting: TrainSetting, choices: Choices, restrict: Restriction) -> bool:
    """Whether a setting of the default space can win: checkpointing in parts at the precisions that
    are fast. What was asked for by name is always tried."""
    if "checkpointing" in restrict or setting.checkpointing not in PARTIAL_CHECKPOINTINGS:
        return True
    precisions = choices["precision"]
    fast = [p for p in precisions if p in REDUCED_PRECISIONS]
    return setting.precision in (fast or precisions)


def _check_library(model: Model, axis: str, value: Value) -> None:
    """Raises UnsupportedError for what the model's library does not have."""
    setting = TrainSetting.model_validate({"batch_size": 1, axis: value})
    if isinstance(model, SwinConfig):
        find_library(model.library).resolve(model, setting)
    elif axis == "attention" and (fault := attention_limit(model, setting)) is not None:
        raise fault.error()
    elif axis == "checkpointing" and not setting.checkpoints_any_model:
        raise UnsupportedError(
            f"{axis} {value} cannot be set in {model.title}, which is no Swin of the planner's.",
            "Omit the option, and build it so in a factory of your own.",
        )


def device_compile_modes(device: DeviceInfo) -> tuple[str, ...]:
    """CUDA graphs (reduce-overhead) and Triton autotuning (max-autotune) are for GPUs; Triton
    needs capability 7.0."""
    if device.kind == "cpu":
        return ("off", "default")
    if device.capability is not None and device.capability < (7, 0):
        return ("off",)
    return ("off", "default", "reduce-overhead", "max-autotune")


def implementations(optimizer: str) -> tuple[str, ...]:
    """What a search tries of an optimizer that is named without one: torch's default and fused."""
    family, implementation = optimizer.partition("-")[::2]
    if implementation or family not in FUSED_FAMILIES:
        return (optimizer,)
    return (family, f"{family}-fused")


def _checkpointings(model: Model, device: DeviceInfo) -> tuple[str, ...]:
    """What the library offers; of chosen stages the first ones, where the activations are. Any
    other model's blocks are found when it is built. A host's memory seldom binds: there no part."""
    if not isinstance(model, SwinConfig):
        return ("none", "blocks")
    library = find_library(model.library)
    first = ["stages:" + ",".join(map(str, range(n))) for n in range(1, model.num_stages)]
    parts = [
        value
        for value in PARTIAL_CHECKPOINTINGS
        if device.kind == "cuda"
        and not library.setting_faults(model, TrainSetting(batch_size=1, checkpointing=value))
    ]
    return in_order(("none", "blocks", "stages", *first[:MAX_CHOSEN_STAGES], *parts))


def _attentions(model: Model) -> tuple[str, ...]:
    if not isinstance(model, SwinConfig):
        return ("library",)
    return tuple(find_library(model.library).attentions(model))


def _narrow(
    axis: str, offered: tuple[Value, ...], wanted: Sequence[Value] | None, device: DeviceInfo
) -> tuple[Value, ...]:
    if wanted is None:
        return tuple(v for v in offered if v != "fp8" and not (v == "fp16" and "bf16" in offered))
    known = (*offered, "pure-bf16") if "bf16" in offered else offered
    lacking = [str(w) for w in wanted if axis == "precision" and w not in known]
    if lacking:
        raise UnsupportedError(
            f"precision {alternatives(lacking)} is not available on {device.name}, which supports "
            f"{alternatives(map(str, offered), 'and')}.",
            "Choose one of them with --precision.",
        )
    return in_order(wanted)


def in_order(values: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))
