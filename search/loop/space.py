"""The space of a search: a finite list of the settings worth probing for a model on a device, each
with a stable id. They differ in axes, fields of a setting with the values that the device has."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from planner.advice.space import batch_ladder, divisors, spread
from planner.core.errors import (
    Fault,
    UnsupportedError,
    UsageError,
    alternatives,
    refuse_faults,
    shorten,
    unknown_name,
)
from planner.core.schema import DeviceInfo, Model, SwinConfig, TrainSetting, parse
from planner.core.schema.setting import (
    COMPILE_MODES,
    FUSED_FAMILIES,
    OWN_OPTIMIZER,
    PARALLELISMS,
    PRECISIONS,
    foreign_options,
)
from planner.core.schema.validation import faults_between
from planner.estimation.arguments import split_images
from planner.libraries.names import faults_of, find_library
from planner.machine.hardware.gpu import device_precisions

AXES = ("precision", "checkpointing", "compile", "attention", "optimizer")  # of every search
# Fields that are the same in every setting of a search, and why.
HELD = {
    "accumulate": "With --global-batch it follows from the micro-batch.",
    "world_size": "A study is of one world: choose it with --gpus.",
    "nodes": "A study is of the GPUs of one machine: choose them with --gpus.",
}
# Fields that may be axes: any other, where it is asked for. The batch has a ladder of its own.
SEARCHABLE = (
    *AXES, *(f for f in TrainSetting.model_fields if f not in (*AXES, *HELD, "batch_size")),
)  # fmt: skip
MAX_BATCH = {"cuda": 4096, "cpu": 256}  # a Swin's step is long saturated at either
MAX_DIVISORS = 24  # of a global batch: more would tell nothing new
MAX_CHOSEN_STAGES = 2
# A search ends when the next three probes together are expected to gain less than this share: a
# judgement (TOGETHER in search/loop/sampler.py).
TOLERANCE = 0.01
# Checkpointing between none and all: tried by default where memory binds, at the precisions that
# can win there.
PARTIAL_CHECKPOINTINGS = ("blocks:every-2", "selective")
REDUCED_PRECISIONS = ("bf16", "fp16")
Value = str | int | float
Restriction = Mapping[str, Sequence[Value]]
AxisValues = Mapping[str, tuple[Value, ...]]
T = TypeVar("T")


class _Alone(TrainSetting):
    """A field by itself: faults between fields are found where the setting is whole."""

    def _faults(self) -> Iterator[Fault]:
        return iter(())


def read_values(field: str, given: object) -> tuple[Value, ...]:
    """The values to which an axis is restricted, as the setting has them. Raises UsageError."""
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
    """The values of each axis that this model has on this device, narrowed by `restrict`; and those
    of every other field in `restrict`. An axis that is not restricted also has the value of
    `start`, if the device and the library have it. fp16 is searched only where it is asked for or
    the device has no bf16: it is as fast, needs a GradScaler and overflows."""
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


def is_worth_trying(setting: TrainSetting, choices: AxisValues, restrict: Restriction) -> bool:
    """Whether a setting of the default space can win: checkpointing in parts at the precisions that
    are fast. What was asked for by name is always tried."""
    if "checkpointing" in restrict or setting.checkpointing not in PARTIAL_CHECKPOINTINGS:
        return True
    fast = [p for p in choices["precision"] if p in REDUCED_PRECISIONS]
    return setting.precision in (fast or choices["precision"])


def _check_library(model: Model, axis: str, value: Value) -> None:
    """Raises UnsupportedError for a value that the model's library does not have."""
    setting = TrainSetting.model_validate({"batch_size": 1, axis: value})
    if isinstance(model, SwinConfig):
        find_library(model.library).resolve(model, setting)
    else:
        refuse_faults(faults_of(model, setting))


def device_compile_modes(device: DeviceInfo) -> tuple[str, ...]:
    """CUDA graphs (reduce-overhead) and Triton autotuning (max-autotune) are for GPUs; Triton
    needs capability 7.0."""
    if device.kind == "cpu":
        return ("off", "default")
    if device.capability is not None and device.capability < (7, 0):
        return ("off",)
    return ("off", "default", "reduce-overhead", "max-autotune")


def implementations(optimizer: str) -> tuple[str, ...]:
    """The implementations of an optimizer that a search tries: torch's default and fused, unless
    one is named."""
    family, implementation = optimizer.partition("-")[::2]
    if implementation or family not in FUSED_FAMILIES:
        return (optimizer,)
    return (family, f"{family}-fused")


def _checkpointings(model: Model, device: DeviceInfo) -> tuple[str, ...]:
    """The checkpointings that a model's library has; of chosen stages the first ones, which hold
    most activations. Other models' blocks are found when they are built. Blocks in part are for
    GPUs, since a host's memory seldom binds."""
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
    axis: str, offered: tuple[Value, ...], asked: Sequence[Value] | None, device: DeviceInfo
) -> tuple[Value, ...]:
    if asked is None:
        return tuple(v for v in offered if v != "fp8" and not (v == "fp16" and "bf16" in offered))
    available = (*offered, "pure-bf16") if "bf16" in offered else offered
    lacking = [str(v) for v in asked if axis == "precision" and v not in available]
    if lacking:
        raise UnsupportedError(
            f"precision {alternatives(lacking)} is not available on {device.name}, which supports "
            f"{alternatives(map(str, offered), 'and')}.",
            "Choose one of them with --precision.",
        )
    return in_order(asked)


def in_order(values: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


@dataclass(frozen=True)
class Candidate:
    """One setting of the space. Settings of one `arm`, as of a bandit, differ only in the
    micro-batch (and, under a global batch, in accumulation)."""

    id: str
    setting: TrainSetting
    arm: str


# "repeat": a disturbed setting, once more.
SearchStage = Literal["calibrate", "search", "repeat", "baseline"]


@dataclass(frozen=True)
class Pick:
    """A candidate to probe, the stage of the search, and the rate below which it cannot win."""

    candidate: Candidate
    stage: SearchStage = "search"
    expected_rate: float | None = None
    give_up_images_per_second: float | None = None


@dataclass(frozen=True)
class Space:
    """The candidates, by arm and then by batch. `choices` are the values of each axis. `left_out`
    says which settings cannot run and why, a line for each law. `first` is probed first."""

    candidates: tuple[Candidate, ...]
    choices: Mapping[str, tuple[Value | None, ...]]
    left_out: tuple[str, ...] = ()
    first: Candidate | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The fields in which the candidates may differ, without the batch."""
        return tuple(self.choices)

    def __len__(self) -> int:
        return len(self.candidates)

    def index(self, setting: TrainSetting) -> int | None:
        """The position of a setting among the candidates; None where it is none."""
        return self._positions.get(setting_id(setting))

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {c.id: i for i, c in enumerate(self.candidates)}

    def find(self, setting: TrainSetting) -> Candidate | None:
        position = self.index(setting)
        return None if position is None else self.candidates[position]


def candidate(setting: TrainSetting) -> Candidate:
    arm = setting.model_copy(update={"batch_size": 1, "accumulate": 1})
    return Candidate(setting_id(setting), setting, setting_id(arm))


def setting_id(setting: TrainSetting) -> str:
    """A stable id of a setting: twelve hex digits of its fields that are not defaults."""
    fields = setting.model_dump(exclude_defaults=True)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def make_space(
    model: Model,
    device: DeviceInfo,
    base: TrainSetting | None = None,
    *,
    restrict: Restriction | None = None,
    batch_sizes: Sequence[int] | None = None,
    global_batch: int | None = None,
    start: TrainSetting | None = None,
) -> Space:
    """Every setting worth probing. Fields of `base` that are no axis hold for all of them.

    - `restrict`: the values of an axis, and of any other field, which becomes an axis by that.
    - `batch_sizes`: the micro-batches. With `global_batch`, micro-batch × accumulate × world is
      exactly that.
    - `start`: the setting to begin with. Only its axes and its micro-batch count, and `restrict`
      and `batch_sizes` win over them.

    Settings whose fields exclude each other, or that the model cannot run, are left out. Raises
    UsageError for an unknown value, UnsupportedError for one that this device or model lacks, and
    where no setting is left.
    """
    of_swin = isinstance(model, SwinConfig)
    held = (base or TrainSetting()).model_dump()  # what levers exclude of the recipe is left open
    base = (base or TrainSetting()).with_recipe(of_swin)
    _check_base(model, base)
    restrict = restrict or {}
    choices = axis_choices(model, device, base, restrict, start)
    batches = _batches(device, base, batch_sizes, global_batch, start)
    excluded: dict[tuple[str, ...], list[Fault]] = {}

    def make(arm: Mapping[str, object], batch: Mapping[str, int]) -> TrainSetting | None:
        setting = _parse({**held, **arm, **batch}, excluded)
        return setting and setting.with_recipe(of_swin)

    settings = {
        setting: None  # an option of another parallelism makes no other
        for values in product(*choices.values())
        for batch in batches
        if (setting := make(dict(zip(choices, values, strict=True)), batch))
        and is_worth_trying(setting, choices, restrict)
    }
    first = None
    if start is not None:  # with the first value of each axis that has not its own
        own = {axis: getattr(start, axis) for axis in choices}
        arm = {a: own[a] if own[a] in values else values[0] for a, values in choices.items()}
        size = start.batch_size
        first = make(arm, min(batches, key=lambda batch: abs(batch["batch_size"] - size)))
    settings |= {} if first is None else {first: None}
    space = _runnable(model, list(settings), excluded)
    return space if first is None else replace(space, first=space.find(first))


def _parse(
    fields: Mapping[str, Any], excluded: dict[tuple[str, ...], list[Fault]]
) -> TrainSetting | None:
    """The setting of `fields`; None where some exclude each other: then that is noted. The
    options that belong to another parallelism than that of `fields` are left out."""
    try:
        foreign = foreign_options(fields["parallelism"])
        return TrainSetting.model_validate({f: v for f, v in fields.items() if f not in foreign})
    except ValidationError as error:
        broken = next(iter(faults_between(error)), None)
        if broken is None:
            raise
        excluded.setdefault(broken.fields, []).append(broken)
        return None


def _runnable(
    model: Model, settings: Sequence[TrainSetting], excluded: Mapping[tuple[str, ...], list[Fault]]
) -> Space:
    """The space of the settings that can run. Raises UnsupportedError where none can."""
    faults = [(setting, faults_of(model, setting)[:1]) for setting in settings]
    runnable = [setting for setting, first in faults if not first]
    refused = [fault for _, first in faults for fault in first]
    if not runnable:
        refuse_faults(refused[:1] or next(iter(excluded.values()))[:1])
    by_law: dict[str, list[Fault]] = {}
    for fault in refused:
        by_law.setdefault(fault.law, []).append(fault)
    left_out = tuple(map(refusal_line, (*excluded.values(), *by_law.values())))
    return replace(space_of(runnable), left_out=left_out)


def refusal_line(faults: Sequence[Fault]) -> str:
    """The line for a law, from its fault of each setting, which differ only in their values."""
    count = len(faults)
    what = "1 setting is" if count == 1 else f"{count:,} settings are"
    return f"{what} left out: {faults[0].message}."


def space_of(settings: Iterable[TrainSetting]) -> Space:
    """A space of just these settings, ordered by arm and batch. Its axes are those of every search,
    and the other fields in which the settings differ."""
    unique = {setting_id(s): s for s in settings}
    candidates = sorted(
        (candidate(s) for s in unique.values()),
        key=lambda c: (*simplicity(c.setting)[:-2], c.arm, c.setting.batch_size),
    )
    choices = {a: in_order(getattr(c.setting, a) for c in candidates) for a in SEARCHABLE}
    return Space(
        candidates=tuple(candidates),
        choices={a: values for a, values in choices.items() if a in AXES or len(values) > 1},
    )


def _check_base(model: Model, base: TrainSetting) -> None:
    """Raises UnsupportedError where no probe could run with the fields of `base` that are no
    axis."""
    if isinstance(model, SwinConfig):
        plain = {"batch_size": 1, "checkpointing": "none", "attention": "library"}
        find_library(model.library).resolve(model, base.uncompiled().model_copy(update=plain))


def _batches(
    device: DeviceInfo,
    base: TrainSetting,
    batch_sizes: Sequence[int] | None,
    global_batch: int | None,
    start: TrainSetting | None,
) -> list[dict[str, int]]:
    more = () if start is None else (start.batch_size,)
    largest = MAX_BATCH[device.kind]
    if global_batch is None:
        sizes = batch_sizes or (*batch_ladder(largest), *more)
        return [{"batch_size": b, "accumulate": base.accumulate} for b in sorted(set(sizes))]
    share = split_images(global_batch, base.world_size, 1)
    usual = (*spread([d for d in divisors(share) if d <= largest], MAX_DIVISORS), *more)
    fitting = [b for b in batch_sizes or usual if share % b == 0]
    if not fitting:
        raise UsageError(
            f"no micro-batch asked for divides {share} (the global batch {global_batch} over "
            f"{base.world_size} devices).",
            f"Choose among {', '.join(map(str, divisors(share)))}.",
        )
    return [{"batch_size": b, "accumulate": share // b} for b in sorted(set(fitting))]


_SIMPLEST_FIRST = {
    "compile": COMPILE_MODES,
    "parallelism": PARALLELISMS,
    "checkpointing": ("none", "selective", "blocks", "stages"),
    "precision": PRECISIONS,
    "attention": ("library", "eager", "sdpa"),
}

_OTHERS = set(SEARCHABLE) - {*AXES, "parallelism"}


def simplicity(setting: TrainSetting) -> tuple[int, ...]:
    """A sort key, simplest first.

    In this order: compilation, which can break; the parallelism, those that shard more last;
    checkpointing; the precision (fp16 needs a GradScaler); the attention; the optimizer's
    implementation; the number of other fields that are not defaults; accumulation; and the batch,
    since a smaller one leaves memory.
    """
    checkpointing = setting.checkpointing.partition(":")[0]
    others = len(_OTHERS & setting.differences(TrainSetting()).keys())
    return (
        _SIMPLEST_FIRST["compile"].index(setting.compile),
        _SIMPLEST_FIRST["parallelism"].index(setting.parallelism),
        _SIMPLEST_FIRST["checkpointing"].index(checkpointing),
        _SIMPLEST_FIRST["precision"].index(setting.precision),
        _SIMPLEST_FIRST["attention"].index(setting.attention),
        int(setting.optimizer_implementation != "foreach"),
        others,
        setting.accumulate,
        setting.batch_size,
    )
