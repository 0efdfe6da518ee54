"""What a person asks for (a model, the images of a step, a memory, and what must stay), and the
levers: what may be changed in a setting so that a step needs less memory or less time.

To add one, add a function that yields its changes and a line in `LEVERS`. A change is a mapping of
fields of a setting to their new values; the field `allocator` stands for the caching allocator's
options. A change may be one that the model, the card or this version cannot have: whoever tries it
finds out, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any, Literal

from planner.core.errors import UnsupportedError, UsageError, unknown_name
from planner.core.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.estimation.arguments import (
    ModelLike,
    SettingLike,
    allocator_here,
    read_gpu,
    read_memory,
    share_of,
)
from planner.estimation.estimate import choose, resolve
from planner.estimation.ledgers import is_on_shapes
from planner.libraries.names import find_library
from planner.machine.hardware.gpu import Gpu, check_precision, find_gpu
from planner.memory.allocator_config import AllocatorConfig

Effect = Literal["nothing", "rounding", "learning rate", "recipe", "trained part"]
EFFECTS: Mapping[Effect, str] = {
    "nothing": "the same numbers",
    "rounding": "the same sums, rounded otherwise",
    "learning rate": "another batch for the optimizer, and so another learning rate",
    "recipe": "other updates of the weights: another recipe, to be tuned",
    "trained part": "only part of the weights is trained",
}
# Those that a search may use unasked; the others with --allow.
FAITHFUL: tuple[Effect, ...] = ("nothing", "rounding", "learning rate")
ALLOCATOR = "allocator"  # the pseudo-field
EXPANDABLE = "expandable_segments:True"
LORA_RANK = 8

Updates = Mapping[str, object]
Role = Literal["adopt", "either", "search", "resort", "micro-batch"]
Changes = Callable[[Model, TrainSetting, Gpu | None], Iterable[Updates]]


@dataclass(frozen=True)
class Lever:
    """`role` says how a search uses it: an "adopt" lever is tried on the wish by itself and taken
    where it costs neither bytes nor seconds; a "search" lever is combined with all others, a
    "resort" too where it may be better than what fits without; what is "either" is adopted or,
    where it does not cost both, combined; the micro-batch is free within the images of a step. A
    waterfall shows what becomes of `fields` as its doing."""

    name: str
    fields: tuple[str, ...]
    effect: Effect
    role: Role
    says: str
    changes: Changes


def _others(field: str, *values: object) -> Changes:
    """The changes of `field` to each of `values`, but for the one that it has."""
    return lambda _, setting, __: [{field: v} for v in values if v != getattr(setting, field)]


def _precision(_: Model, setting: TrainSetting, gpu: Gpu | None) -> Iterator[Updates]:
    half = "fp16" if gpu is not None and not gpu.has_bf16 else "bf16"
    order = ("fp32", "tf32", half)
    if setting.precision in order:
        yield from ({"precision": p} for p in order[order.index(setting.precision) + 1 :])


def _attention(model: Model, setting: TrainSetting, gpu: Gpu | None) -> Iterator[Updates]:
    """Of another model than a Swin, whose steps are recorded, only away from eager."""
    known: tuple[str, ...] = ("eager", "sdpa")
    if not isinstance(model, SwinConfig):
        known = known[1:] if setting.attention == "eager" else ()
    elif setting.attention == "library":
        default = find_library(model.library).default_attention(model)
        known = tuple(a for a in known if a != default)
    yield from ({"attention": a} for a in known if a != setting.attention)


def _fused_optimizer(_: Model, setting: TrainSetting, gpu: Gpu | None) -> Iterator[Updates]:
    if setting.optimizer_implementation not in ("fused", "8bit"):
        yield {"optimizer": f"{setting.optimizer_family}-fused"}


def _checkpointing(model: Model, setting: TrainSetting, gpu: Gpu | None) -> Iterator[Updates]:
    """From what saves least to what saves most. The first blocks hold most activations: of the
    first k those before the longest stage, and half of all. Stages are as their blocks."""
    values = ["none", "blocks"]
    if isinstance(model, SwinConfig):
        depths = model.depths
        first, half = sum(depths[: depths.index(max(depths))]), sum(depths) // 2
        parts = sorted({k for k in (first, half) if 0 < k < sum(depths)})
        values = ["none", "selective", *(f"blocks:{k}" for k in parts), "blocks"]
    yield from ({"checkpointing": v} for v in values if v != setting.checkpointing)


def _compile(_: Model, setting: TrainSetting, gpu: Gpu | None) -> Iterator[Updates]:
    """max-autotune and its kin differ from these in tuned kernels only, which no estimate knows."""
    plain = {"compile_scope": "model", "activation_memory_budget": 1.0}
    for mode in ("default", "reduce-overhead"):
        if mode != setting.compile:
            yield {"compile": mode}
    if setting.compile != "off":
        yield {"compile": "off", **plain}


def _memory_budget(_: Model, setting: TrainSetting, gpu: Gpu | None) -> Iterator[Updates]:
    mode = setting.compile if setting.compile != "off" else "default"
    yield {"activation_memory_budget": 0.5, "compile": mode}


def _eight_bits(_: Model, setting: TrainSetting, gpu: Gpu | None) -> Iterator[Updates]:
    if setting.precision != "fp8":
        yield {"precision": "fp8"}


def _other_optimizers(_: Model, setting: TrainSetting, gpu: Gpu | None) -> Iterator[Updates]:
    for optimizer in ("adamw-8bit", "lion", "adafactor"):
        if optimizer.partition("-")[0] != setting.optimizer_family or "8bit" in optimizer:
            yield {"optimizer": optimizer}


def _adapters(_: Model, setting: TrainSetting, gpu: Gpu | None) -> Iterator[Updates]:
    if not setting.lora_rank:
        yield {"lora_rank": LORA_RANK}
        yield {"lora_rank": LORA_RANK, "lora_targets": "all"}


def _frozen_stages(model: Model, setting: TrainSetting, gpu: Gpu | None) -> Iterator[Updates]:
    last = model.num_stages if isinstance(model, SwinConfig) else 2
    yield from ({"frozen_stages": n} for n in range(setting.frozen_stages + 1, last))


def _micro_batch(_: Model, setting: TrainSetting, gpu: Gpu | None) -> Iterator[Updates]:
    """The fewest parts, as an example: a search tries every divisor."""
    for parts in range(2, setting.batch_size + 1):
        if setting.batch_size % parts == 0:
            yield {
                "batch_size": setting.batch_size // parts, "accumulate": parts * setting.accumulate
            }  # fmt: skip
            return


# In the order in which a waterfall applies them.
LEVERS: tuple[Lever, ...] = (
    Lever("precision", ("precision",), "rounding", "adopt",
          "16 bits where they are enough", _precision),
    Lever("fused optimizer", ("optimizer",), "nothing", "adopt",
          "one kernel for the update, without temporaries", _fused_optimizer),
    Lever("allocator", (ALLOCATOR,), "nothing", "adopt",
          "segments that grow in place of new ones", lambda *_: [{ALLOCATOR: EXPANDABLE}]),
    Lever("memory format", ("memory_format",), "nothing", "adopt",
          "the layout of images and feature maps",
          _others("memory_format", "channels_last", "contiguous")),
    Lever("attention", ("attention",), "rounding", "either",
          "one kernel, or one per operation", _attention),
    Lever("other optimizers", ("optimizer",), "recipe", "search",
          "less state per weight", _other_optimizers),
    Lever("pure bf16", ("precision",), "recipe", "search",
          "weights and optimizer state in bf16 too: small updates are lost",
          _others("precision", "pure-bf16")),
    Lever("fp8", ("precision",), "recipe", "search",
          "linear layers multiply in 8 bits", _eight_bits),
    Lever("adapters", ("lora_rank", "lora_targets"), "trained part", "search",
          "low-rank adapters in place of the weights", _adapters),
    Lever("frozen stages", ("frozen_stages",), "trained part", "search",
          "the first stages are not trained", _frozen_stages),
    Lever("optimizer in backward", ("optimizer_in_backward",), "nothing", "search",
          "each gradient is used and freed at once", _others("optimizer_in_backward", True)),
    Lever("offload", ("offload",), "nothing", "resort",
          "saved activations wait in the host's memory", _others("offload", "activations", "none")),
    Lever("checkpointing", ("checkpointing",), "nothing", "search",
          "activations are computed again in backward", _checkpointing),
    Lever("accumulation", ("batch_size", "accumulate"), "nothing", "micro-batch",
          "the images of a step in smaller micro-batches", _micro_batch),
    Lever("memory budget", ("activation_memory_budget",), "rounding", "search",
          "the compiler recomputes what is cheap", _memory_budget),
    Lever("compile", ("compile", "compile_scope", "activation_memory_budget"), "rounding", "search",
          "pointwise chains become one kernel", _compile),
)  # fmt: skip


def effects(setting: TrainSetting, plain: TrainSetting) -> tuple[Effect, ...]:
    """What changes for the result when `setting` is run in place of `plain`."""
    found: set[Effect] = set()
    changed = setting.differences(plain)
    for field in ("compile", "attention", "activation_memory_budget"):
        if field in changed:
            found.add("rounding")
    if "precision" in changed:
        found.add("recipe" if setting.precision in ("pure-bf16", "fp8") else "rounding")
    is_8bit = setting.optimizer_implementation == "8bit"
    was_8bit = plain.optimizer_implementation == "8bit"
    if setting.optimizer_family != plain.optimizer_family or is_8bit != was_8bit:
        found.add("recipe")
    if {"lora_rank", "lora_targets", "frozen_stages"} & changed.keys():
        found.add("trained part")
    if setting.global_batch != plain.global_batch:
        found.add("learning rate")
    return tuple(e for e in EFFECTS if e in found) or ("nothing",)


# Whose rates order the ways where only a memory is named.
REFERENCE = "a100-sxm-80gb"
SAMPLE_BATCH = 64
ALLOWED: Mapping[str, Effect] = {"recipe": "recipe", "adapters": "trained part"}
NOT_COMPARED = "recorded, and so not compared: ask 'planner estimate'"
KEPT_EFFECTS: Mapping[str, Effect] = {
    **{effect.replace(" ", "-"): effect for effect in EFFECTS if effect != "nothing"},
    "adapters": "trained part",
}


@dataclass(frozen=True)
class Choice:
    """A setting, and whether the allocator's segments are to be expandable although the wish's
    are not."""

    setting: TrainSetting
    expandable: bool = False


@dataclass(frozen=True)
class Wish:
    """`plain` is the setting as a person would run it. `share` are the images of one optimizer step
    on one device that every way must see, None where the batch is free. `keep` are fields that stay
    as they are, `allow` the effects that are welcome. `gpu` is None where only a memory was named:
    `rated` is then the card by whose rates ways are ordered. `link` joins several of them, as
    `planner estimate --link` takes it."""

    model: Model
    plain: TrainSetting
    gpu: Gpu | None
    memory_bytes: int | None
    allocator: AllocatorConfig | None
    share: int | None
    keep: frozenset[str]
    allow: frozenset[Effect]
    link: str | None = None

    @property
    def rated(self) -> Gpu:
        return self.gpu or find_gpu(REFERENCE)

    @property
    def is_splittable(self) -> bool:
        """Whether the images of a step may be split into micro-batches otherwise."""
        return self.share is not None and not self.keep & {"batch_size", "accumulate"}

    @property
    def sample(self) -> Choice:
        """The wish at a micro-batch that everything takes, on which levers are tried."""
        if "batch_size" in self.keep or (self.share is not None and not self.is_splittable):
            return Choice(self.plain)
        batch = min(self.plain.batch_size, SAMPLE_BATCH)
        parts = 1 if self.is_splittable else self.plain.accumulate
        return Choice(self.plain.model_copy(update={"batch_size": batch, "accumulate": parts}))

    def distance(self, choice: Choice) -> float:
        """How far the images of a step are from those of the wish: 0 where they are the same."""
        plain, setting = self.plain, choice.setting
        images = setting.batch_size * setting.accumulate
        return abs(log(images / (plain.batch_size * plain.accumulate)))

    def config(self, choice: Choice) -> AllocatorConfig | None:
        """The caching allocator's options under `choice`."""
        if not choice.expandable:
            return self.allocator
        base = self.allocator or AllocatorConfig()
        said = base.source or "the options given"
        source = f"{said}, and expandable segments" if self.allocator else "expandable segments"
        return replace(base, expandable_segments=True, source=source)

    def allowing(self, effect: Effect) -> Wish:
        """The same wish, where that effect is welcome too."""
        return replace(self, allow=self.allow | {effect})

    def changes(self, lever: Lever, choice: Choice) -> list[Updates]:
        """What `lever` may change in `choice` without touching what is to be kept."""
        if lever.effect in self.keep:
            return []
        found = lever.changes(self.model, choice.setting, self.rated)
        return [updates for updates in found if not self._touches(updates, choice)]

    def _touches(self, updates: Updates, choice: Choice) -> bool:
        fields = self.keep & updates.keys()
        return any(f == ALLOCATOR or updates[f] != getattr(choice.setting, f) for f in fields)

    def apply(self, choice: Choice, updates: Updates) -> Choice:
        """`choice` with `updates`. Raises UsageError or UnsupportedError where that cannot be."""
        from pydantic import ValidationError

        fields = {k: v for k, v in updates.items() if k != ALLOCATOR}
        try:
            setting = TrainSetting.model_validate({**choice.setting.model_dump(), **fields})
        except ValidationError as error:
            said = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
            raise UnsupportedError(said) from None
        self.resolved(setting)
        if is_on_shapes(self.model, choice.setting) and not is_on_shapes(self.model, setting):
            raise UnsupportedError(NOT_COMPARED)
        return Choice(setting, choice.expandable or ALLOCATOR in updates)

    def resolved(self, setting: TrainSetting) -> ResolvedSetting:
        """As the model's library runs it. Raises UnsupportedError where it does not."""
        check_precision(self.gpu, setting.precision)
        return resolve(self.model, setting)[1]


def read_wish(
    model: ModelLike,
    setting: SettingLike | None,
    *,
    gpu: str | Gpu | None,
    memory_bytes: int | str | None,
    batch_size: int | None,
    global_batch: int | None,
    keep: Iterable[str],
    allow: Iterable[str],
    allocator: str | AllocatorConfig | None,
    overrides: Mapping[str, Any],
    link: str | None = None,
) -> Wish:
    """Raises UsageError for what cannot be read, UnsupportedError for what cannot be."""
    device, memory = read_gpu(gpu), read_memory(memory_bytes)
    if device is None and memory is None:
        raise UsageError("advice needs a memory to fit into.", "Add --gpu NAME or --memory SIZE.")
    kept, allowed = _kept(keep), _allowed(allow)
    given = dict(overrides)
    if batch_size is not None:
        given["batch_size"] = batch_size
    config, plain = choose(model, setting, device, _split_batch(given, global_batch))
    is_fixed = global_batch is not None or "batch_size" in given or "learning rate" in kept
    is_fixed = is_fixed or isinstance(setting, TrainSetting) or "batch_size" in (setting or {})
    return Wish(
        model=config,
        plain=_as_said(plain, setting, given),
        gpu=device,
        memory_bytes=memory,
        allocator=allocator_here(allocator),
        share=plain.batch_size * plain.accumulate if is_fixed else None,
        keep=kept,
        allow=allowed,
        link=link,
    )


def _split_batch(given: Mapping[str, Any], global_batch: int | None) -> dict[str, Any]:
    """A global batch, over the devices and the micro-batches that were named beside it."""
    gpus, parts = (str(given.get(field, 1)) for field in ("world_size", "accumulate"))
    if global_batch is None or not (gpus + parts).isdecimal():
        return dict(given)  # what is no number is said where all fields are checked
    share = share_of(global_batch, int(gpus), int(parts), "batch_size" in given)
    return {**given, "batch_size": share}


def _as_said(
    resolved: TrainSetting, setting: SettingLike | None, given: Mapping[str, Any]
) -> TrainSetting:
    """The setting with its attention as it was said: `library`, where nothing was."""
    said: object = given.get("attention")
    if said is None and isinstance(setting, TrainSetting):
        said = setting.attention
    elif said is None and isinstance(setting, Mapping):
        said = setting.get("attention")
    return resolved.model_copy(update={"attention": said or "library"})


def _kept(names: Iterable[str]) -> frozenset[str]:
    fields = {field for lever in LEVERS for field in lever.fields}
    known = sorted({*fields, *KEPT_EFFECTS})
    shown = {lever.name.replace(" ", "-"): lever.fields for lever in LEVERS}
    shown |= {"expandable-segments": ("allocator",), "batch": ("batch_size",)}
    shown["offload-activations"] = shown["offload"]
    kept = set()
    for name in _words(names):
        if name.replace("-", "_") in (*TrainSetting.model_fields, *fields):
            kept.add(name.replace("-", "_"))
        elif name in KEPT_EFFECTS:
            kept.add(KEPT_EFFECTS[name])
        elif name in shown:
            kept.update(shown[name])
        else:
            way_out = f"Keep any of: {', '.join(known)}."
            raise unknown_name("field or effect to keep", name, known, way_out)
    return frozenset(kept)


def _allowed(names: Iterable[str]) -> frozenset[Effect]:
    found: set[Effect] = set(FAITHFUL)
    for name in _words(names):
        if name not in ALLOWED:
            raise unknown_name(
                "effect to allow", name, ALLOWED, f"Allow any of: {', '.join(ALLOWED)}."
            )
        found.add(ALLOWED[name])
    return frozenset(found)


def _words(names: Iterable[str]) -> list[str]:
    """Of a text, those between its commas."""
    given = names.split(",") if isinstance(names, str) else names
    return [name.strip().casefold().replace("_", "-").replace(" ", "-") for name in given]
