"""What a search may vary: fields of a setting, and the values that each may take on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from planner.core.errors import UnsupportedError, UsageError, alternatives, shorten, unknown_name
from planner.core.schema import DeviceInfo, Model, SwinConfig, TrainSetting, parse
from planner.core.schema.distribution import PARALLELISMS, Distribution
from planner.core.schema.setting import (
    ATTENTIONS,
    COMPILE_MODES,
    COMPILED_FIELDS,
    FUSED_FAMILIES,
    OWN_OPTIMIZER,
    PRECISIONS,
)
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
# What lets several values of a field be read one by one, whatever else it belongs to.
_COMPANY: Mapping[str, Mapping[str, Any]] = {
    **{field: {"compile": "default"} for field in COMPILED_FIELDS},
    "lora_targets": {"lora_rank": 1},
    **{
        f: {"parallelism": p} for p in ("ddp", "fsdp", "zero2") for f in Distribution.own_options(p)
    },
}

Value = str | int | float
Restriction = Mapping[str, Sequence[Value]]
Choices = Mapping[str, tuple[Value, ...]]
T = TypeVar("T")


def read_values(field: str, given: object) -> tuple[Value, ...]:
    """The values that an axis may take, as the setting has them. Raises UsageError."""
    if field not in SEARCHABLE:
        if field in HELD:
            raise held_error(field)
        raise unknown_name("axis", field, SEARCHABLE, f"One of {', '.join(SEARCHABLE)}.")
    values = (given,) if isinstance(given, str | int | float) else given
    texts_only = field in AXES
    if (
        not isinstance(values, Sequence)
        or not values
        or any(v == "" or (texts_only and not isinstance(v, str)) for v in values)
    ):
        raise UsageError(
            f"restrict names the values {field} may take, and {shorten(given)} names none.",
            "Omit the axis to search all of it.",
        )
    if field in AXES:
        return tuple(values)
    if field == "parallelism":
        return read_parallelisms([str(value) for value in values])
    company = _COMPANY.get(field, {})
    return tuple(
        getattr(parse(TrainSetting, {**company, field: value}, "the search"), field)
        for value in values
    )


def read_parallelisms(values: Sequence[str]) -> tuple[Value, ...]:
    """Names of parallelisms; what they need of a world is seen where it is known."""
    for value in values:
        if value not in PARALLELISMS:
            way_out = f"One or more of {', '.join(PARALLELISMS)}."
            raise unknown_name("parallelism", value, PARALLELISMS, way_out)
    return in_order(values)


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
    offered = {
        "precision": device_precisions(device),
        "checkpointing": _checkpointings(model, device),
        "compile": device_compile_modes(device),
        "attention": _attentions(model),
        "optimizer": implementations(base.optimizer),
    }
    asked = {axis: [str(v) for v in restrict[axis]] for axis in AXES if axis in restrict}
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


def _check_library(model: Model, axis: str, value: str) -> None:
    """Raises UnsupportedError for what the model's library does not have."""
    if isinstance(model, SwinConfig):
        find_library(model.library).resolve(model, TrainSetting.model_validate(
            {"batch_size": 1, axis: value}
        ))  # fmt: skip
    elif axis == "attention":
        fault = attention_limit(model, TrainSetting(attention=value))
        if fault is not None:
            raise fault.error()
    elif not (axis == "checkpointing" and TrainSetting(checkpointing=value).checkpoints_any_model):
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
    axis: str, offered: tuple[str, ...], wanted: Sequence[str] | None, device: DeviceInfo
) -> tuple[str, ...]:
    if wanted is None:
        return tuple(v for v in offered if v != "fp8" and not (v == "fp16" and "bf16" in offered))
    _check_known(axis, wanted)
    by_device = axis in ("precision", "compile")
    lacking = [w for w in wanted if w not in offered] if by_device else []
    lacking = [w for w in lacking if not _only_on_request(axis, w, offered)]
    if lacking:
        raise UnsupportedError(
            f"{axis} {alternatives(lacking)} is not available on {device.name}, which supports "
            f"{alternatives(offered, 'and')}.",
            f"Choose one of them with --{axis}.",
        )
    return in_order(wanted)


def _only_on_request(axis: str, value: str, offered: Sequence[str]) -> bool:
    """Values that are not searched by default but may be asked for."""
    on_request: dict[str, set[str]] = {
        "precision": {"pure-bf16"} if "bf16" in offered else set(),
        "compile": {"reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"},
    }
    return value in on_request.get(axis, set())


def _check_known(axis: str, wanted: Sequence[str]) -> None:
    attentions = ("library", *ATTENTIONS)
    known = {"precision": PRECISIONS, "compile": COMPILE_MODES, "attention": attentions}.get(axis)
    for value in wanted:
        if known and value not in known:
            raise unknown_name(axis, value, known, f"One or more of {', '.join(known)}.")
        try:
            TrainSetting.model_validate({axis: value})
        except ValueError as error:
            raise UsageError(f"{axis} {value!r} cannot be read.", _first_message(error)) from None


def _first_message(error: ValueError) -> str:
    entries = error.errors() if hasattr(error, "errors") else []
    return str(entries[0]["msg"]).removeprefix("Value error, ") if entries else str(error)


def in_order(values: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))
