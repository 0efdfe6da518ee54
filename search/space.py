"""The settings worth probing for a model on a device: finite, listed, each with a stable id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

from planner.errors import UnsupportedError, UsageError, alternatives, unknown_name
from planner.hardware.precisions import device_precisions
from planner.libraries.limits import SettingFault, limit_of
from planner.libraries.registry import find_library
from planner.schema import DeviceInfo, Model, SwinConfig, TrainSetting
from planner.schema.setting import COMPILE_MODES, FUSED_FAMILIES, PRECISIONS

AXES = ("precision", "checkpointing", "compile", "attention", "optimizer")
MAX_BATCH = {"cuda": 4096, "cpu": 256}  # a Swin's step is long saturated at either
MAX_CHOSEN_STAGES = 2
MAX_DIVISORS = 24  # of a global batch: more are thinned out, and say nothing new


@dataclass(frozen=True)
class Candidate:
    """One setting of the space. `arm` is everything but the batch: settings of one arm differ in
    micro-batch (and, under a global batch, in accumulation) alone."""

    id: str
    setting: TrainSetting
    arm: str

    @property
    def images(self) -> int:
        """Images of one optimizer step on one device."""
        return self.setting.batch_size * self.setting.accumulate


@dataclass(frozen=True)
class Space:
    """The candidates, by arm and then by batch. `rungs` are the micro-batches, smallest first;
    `choices` the values of each axis; `left_out` says what cannot run and why, a line for each
    reason."""

    candidates: tuple[Candidate, ...]
    rungs: tuple[int, ...]
    choices: Mapping[str, tuple[str, ...]]
    left_out: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.candidates)

    def index(self, setting: TrainSetting) -> int | None:
        """The position of a setting among the candidates, or None where it is not one."""
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
    """A stable name for a setting: twelve hex digits of what in it is not a default."""
    said = json.dumps(setting.model_dump(exclude_defaults=True), sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def make_space(
    model: Model,
    device: DeviceInfo,
    base: TrainSetting | None = None,
    *,
    restrict: Mapping[str, Sequence[str]] | None = None,
    batch_sizes: Sequence[int] | None = None,
    global_batch: int | None = None,
) -> Space:
    """Every setting to consider. Fields of `base` that are no axis hold for all of them.

    `restrict` names the values an axis may take; `batch_sizes` the micro-batches. With
    `global_batch`, micro-batch × accumulate × world is exactly that.
    Raises UsageError for a value nobody knows, UnsupportedError for one this device or model lacks.
    """
    base = base or TrainSetting()
    if base.parallelism != "none":
        raise UnsupportedError(
            f"a probe runs on one device without {base.parallelism.upper()}, and parallelism is "
            f"{base.parallelism!r}.",
            "Tune with parallelism none, and see with 'planner estimate --set "
            f"parallelism={base.parallelism}' what it adds.",
        )
    _check_base(model, base)
    choices = axis_choices(model, device, base, restrict or {})
    batches = _batches(device, base, batch_sizes, global_batch)
    settings = [
        parse_setting(base, {**dict(zip(AXES, arm, strict=True)), **batch})
        for arm in product(*(choices[axis] for axis in AXES))
        for batch in batches
    ]
    return _runnable(model, settings)


def _runnable(model: Model, settings: Sequence[TrainSetting]) -> Space:
    """The space of those that can run. Raises UnsupportedError where there are none."""
    limits = [(setting, _limit(model, setting)) for setting in settings]
    found = [setting for setting, limit in limits if limit is None]
    refused = [limit for _, limit in limits if limit is not None]
    if not found:
        raise refused[0].error()
    return replace(space_of(found), left_out=_in_order(_left_out(refused)))


def _limit(model: Model, setting: TrainSetting) -> SettingFault | None:
    attention: str = setting.attention
    if attention == "library" and isinstance(model, SwinConfig):
        attention = find_library(model.library).default_attention(model)
    return limit_of(model, setting, attention)


def _left_out(refused: Sequence[SettingFault]) -> Iterator[str]:
    for limit in refused:
        count = sum(other.law == limit.law for other in refused)
        yield f"{limit.law}: {count} settings are left out."


def space_of(settings: Iterable[TrainSetting]) -> Space:
    """A space of just these settings (a recorded table), ordered by arm and batch."""
    unique = {setting_id(s): s for s in settings}
    found = sorted(
        (candidate(s) for s in unique.values()),
        key=lambda c: (*simplicity(c.setting)[:-2], c.arm, c.setting.batch_size),
    )
    return Space(
        candidates=tuple(found),
        rungs=tuple(sorted({c.setting.batch_size for c in found})),
        choices={a: _in_order(getattr(c.setting, a) for c in found) for a in AXES},
    )


def parse_setting(base: TrainSetting, update: Mapping[str, object]) -> TrainSetting:
    """`base` with some fields changed, validated."""
    return TrainSetting.model_validate({**base.model_dump(), **update})


def axis_choices(
    model: Model, device: DeviceInfo, base: TrainSetting, restrict: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """The values of each axis that this model has on this device, narrowed to those asked for.

    fp16 is searched only where it is asked for, or the device has no bf16: it is as fast as bf16,
    wants a GradScaler and overflows.
    """
    offered = {
        "precision": device_precisions(device),
        "checkpointing": _checkpointings(model),
        "compile": device_compile_modes(device),
        "attention": _attentions(model),
        "optimizer": _optimizers(base.optimizer),
    }
    chosen = {axis: _narrow(axis, offered[axis], restrict.get(axis), device) for axis in AXES}
    for axis in ("checkpointing", "attention"):
        for value in restrict.get(axis) or ():
            _check_library(model, axis, value)
    for value in chosen["optimizer"]:
        parse_setting(base, {"optimizer": value}).check_optimizer()
    return chosen


def _check_base(model: Model, base: TrainSetting) -> None:
    """Raises UnsupportedError for what no probe could run: fields of `base` that are no axis."""
    if isinstance(model, SwinConfig):
        plain = {
            "batch_size": 1, "compile": "off", "checkpointing": "none", "attention": "library",
        }  # fmt: skip
        find_library(model.library).resolve(model, parse_setting(base, plain))


def _check_library(model: Model, axis: str, value: str) -> None:
    """Raises UnsupportedError for what the model's library does not have."""
    if isinstance(model, SwinConfig):
        find_library(model.library).resolve(
            model, parse_setting(TrainSetting(batch_size=1), {axis: value})
        )
    elif value != "library" and not (
        axis == "checkpointing" and TrainSetting(checkpointing=value).checkpoints_any_model
    ):
        raise UnsupportedError(
            f"{axis} {value} cannot be set in {model.title}, which is no Swin of the planner's.",
            "Omit the option, and build it so in a factory of your own.",
        )


def device_compile_modes(device: DeviceInfo) -> tuple[str, ...]:
    """CUDA graphs (reduce-overhead) and Triton autotuning (max-autotune) are for GPUs; Triton
    wants capability 7.0."""
    if device.kind == "cpu":
        return ("off", "default")
    if device.capability is not None and device.capability < (7, 0):
        return ("off",)
    return ("off", "default", "reduce-overhead", "max-autotune")


def _optimizers(optimizer: str) -> tuple[str, ...]:
    family, implementation = optimizer.partition("-")[::2]
    if implementation or family not in FUSED_FAMILIES:
        return (optimizer,)
    return (family, f"{family}-fused")


def _checkpointings(model: Model) -> tuple[str, ...]:
    """What the library offers; of chosen stages the first ones, where the activations are. Any
    other model's blocks are found when it is built."""
    if not isinstance(model, SwinConfig):
        return ("none", "blocks")
    offered = find_library(model.library).checkpointings(model)
    if "stages" not in offered:
        return offered
    first = ["stages:" + ",".join(map(str, range(n))) for n in range(1, model.num_stages)]
    return (*offered, *first[:MAX_CHOSEN_STAGES])


def _attentions(model: Model) -> tuple[str, ...]:
    if not isinstance(model, SwinConfig):
        return ("library",)
    return tuple(find_library(model.library).attentions(model))


def _narrow(
    axis: str, offered: tuple[str, ...], wanted: Sequence[str] | None, device: DeviceInfo
) -> tuple[str, ...]:
    if wanted is None:
        return tuple(v for v in offered if not (v == "fp16" and "bf16" in offered))
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
    return _in_order(wanted)


def _only_on_request(axis: str, value: str, offered: Sequence[str]) -> bool:
    """Values that are not searched by default but may be asked for."""
    on_request: dict[str, set[str]] = {
        "precision": {"pure-bf16"} if "bf16" in offered else set(),
        "compile": {"reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"},
    }
    return value in on_request.get(axis, set())


def _check_known(axis: str, wanted: Sequence[str]) -> None:
    known = {"precision": PRECISIONS, "compile": COMPILE_MODES}.get(
        axis, ("library", "eager", "sdpa") if axis == "attention" else None
    )
    for value in wanted:
        if known and value not in known:
            raise unknown_name(axis, value, known, f"One or more of {', '.join(known)}.")
        try:
            parse_setting(TrainSetting(), {axis: value})
        except ValueError as error:
            raise UsageError(f"{axis} {value!r} cannot be read.", _first_message(error)) from None


def _first_message(error: ValueError) -> str:
    entries = error.errors() if hasattr(error, "errors") else []
    return str(entries[0]["msg"]).removeprefix("Value error, ") if entries else str(error)


def batch_ladder(largest: int) -> tuple[int, ...]:
    """Powers of two and 3·2^k up to `largest`: from 16 on, all are multiples of 8."""
    powers = [2**k for k in range(largest.bit_length())]
    return tuple(sorted(b for p in powers for b in {p, 3 * p} if b <= largest))


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of `number`, smallest first."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def _batches(
    device: DeviceInfo,
    base: TrainSetting,
    batch_sizes: Sequence[int] | None,
    global_batch: int | None,
) -> list[dict[str, int]]:
    largest = MAX_BATCH[device.kind]
    if global_batch is None:
        wanted = batch_sizes or batch_ladder(largest)
        return [{"batch_size": b, "accumulate": base.accumulate} for b in sorted(set(wanted))]
    if global_batch < 1 or global_batch % base.world_size:
        raise UsageError(
            f"a global batch of {global_batch} cannot be split over {base.world_size} devices.",
            f"Choose a multiple of {base.world_size}.",
        )
    share = global_batch // base.world_size
    fitting = [b for b in batch_sizes or _spread(divisors(share), largest) if share % b == 0]
    if not fitting:
        raise UsageError(
            f"no micro-batch asked for divides {share} (the global batch {global_batch} over "
            f"{base.world_size} devices).",
            f"Choose among {', '.join(map(str, divisors(share)))}.",
        )
    return [{"batch_size": b, "accumulate": share // b} for b in sorted(set(fitting))]


def _spread(values: tuple[int, ...], largest: int) -> list[int]:
    """At most MAX_DIVISORS of `values`, evenly over their order, the multiples of 8 first."""
    usable = [v for v in values if v <= largest]
    while len(usable) > MAX_DIVISORS:
        ratios = {b: b / a for a, b in pairwise(usable[:-1])}
        usable.remove(min(ratios, key=lambda b: (b % 8 == 0, ratios[b])))
    return usable


def _in_order(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


_PLAIN = {
    "compile": COMPILE_MODES,
    "checkpointing": ("none", "selective", "blocks", "stages", "nested"),
    "precision": PRECISIONS,
    "attention": ("library", "eager", "sdpa"),
}


def simplicity(setting: TrainSetting) -> tuple[int, ...]:
    """Sort key, simplest first; among settings equal within noise the simplest wins.

    First what can break (compilation), then what is added to the model (checkpointing), then the
    arithmetic (fp32 before bf16 before fp16, which needs a GradScaler), the attention, the
    optimizer's implementation, accumulation, and last the batch (a smaller one leaves memory).
    """
    checkpointing = setting.checkpointing.partition(":")[0]
    return (
        _PLAIN["compile"].index(setting.compile),
        _PLAIN["checkpointing"].index(checkpointing),
        _PLAIN["precision"].index(setting.precision),
        _PLAIN["attention"].index(setting.attention),
        int(setting.optimizer_implementation != "foreach"),
        setting.accumulate,
        setting.batch_size,
    )
