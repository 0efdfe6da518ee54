"""What a person asks for (a model, the images of a step, a memory, and what must stay), and the
levers: what may be changed in a setting so that a step needs less memory or less time.

To add a lever, write a function that yields its changes, and a line in `LEVERS`. A change maps
fields of a setting to new values; the pseudo-field `allocator` stands for the caching allocator's
options. A lever may offer a change that the model, the card or this version cannot run: whoever
applies the change finds that out and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any, Literal

from planner.core.errors import UnsupportedError, UsageError, refuse_faults, unknown_name
from planner.core.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.validation import faults_between
from planner.estimation.arguments import (
    ModelLike,
    SettingLike,
    Target,
    split_images,
)
from planner.estimation.estimate import default_precision, read_resolved, resolve
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
# The effects that a search may use unasked; --allow adds the others.
FAITHFUL: tuple[Effect, ...] = ("nothing", "rounding", "learning rate")
ALLOCATOR = "allocator"  # the pseudo-field
EXPANDABLE = "expandable_segments:True"
LORA_RANK = 8

Updates = Mapping[str, object]
Role = Literal["adopt", "either", "search", "resort", "micro-batch"]
Changes = Callable[["Wish", TrainSetting], Iterable[Updates]]


@dataclass(frozen=True)
class Lever:
    """Something that may be changed in a setting. Its `role` is how a search uses it:

    - "adopt": tried on the wish by itself, and adopted where it costs neither bytes nor seconds;
    - "search": combined with all other levers;
    - "resort": combined too, but only where it may be better than what fits without it;
    - "either": adopted, or combined unless it costs both bytes and seconds;
    - "micro-batch": free within the images of a step.

    A waterfall attributes every change of `fields` to the lever. `is_for_speed`: the lever treats
    what the device waits for.
    """

    name: str
    fields: tuple[str, ...]
    effect: Effect
    role: Role
    says: str
    changes: Changes
    is_for_speed: bool = False


def _other_values(field: str, *values: object) -> Changes:
    """The changes of `field` to each of `values` but the one that it has."""
    return lambda _, setting: [{field: v} for v in values if v != getattr(setting, field)]


def _lower_precisions(wish: Wish, setting: TrainSetting) -> Iterator[Updates]:
    order = ("fp32", "tf32", default_precision(wish.rates_of))
    if setting.precision in order:
        yield from ({"precision": p} for p in order[order.index(setting.precision) + 1 :])


def _other_attentions(wish: Wish, setting: TrainSetting) -> Iterator[Updates]:
    """A model that is no Swin, whose steps are recorded, is only led away from eager attention."""
    attentions: tuple[str, ...] = ("eager", "sdpa")
    if not isinstance(wish.model, SwinConfig):
        attentions = ("sdpa",) if setting.attention == "eager" else ()
    elif setting.attention == "library":
        default = find_library(wish.model.library).default_attention(wish.model)
        attentions = tuple(a for a in attentions if a != default)
    yield from ({"attention": a} for a in attentions if a != setting.attention)


def _fused_optimizer(_: Wish, setting: TrainSetting) -> Iterator[Updates]:
    if setting.optimizer_implementation not in ("fused", "8bit"):
        yield {"optimizer": f"{setting.optimizer_family}-fused"}


def _checkpointings(wish: Wish, setting: TrainSetting) -> Iterator[Updates]:
    """From the one that saves least to the one that saves most. The first blocks hold most
    activations, so `blocks:k` is offered for the blocks before the longest stage and for half of
    all. Whole stages save what their blocks save."""
    values = ["none", "blocks"]
    if isinstance(wish.model, SwinConfig):
        depths = wish.model.depths
        before_longest, half = sum(depths[: depths.index(max(depths))]), sum(depths) // 2
        counts = sorted({k for k in (before_longest, half) if 0 < k < sum(depths)})
        values = ["none", "selective", *(f"blocks:{k}" for k in counts), "blocks"]
    yield from ({"checkpointing": v} for v in values if v != setting.checkpointing)


def _compile_modes(_: Wish, setting: TrainSetting) -> Iterator[Updates]:
    """max-autotune and max-autotune-no-cudagraphs differ from these two modes only in kernels that
    are tuned on the device, which no estimate knows."""
    for mode in ("default", "reduce-overhead"):
        if mode != setting.compile:
            yield {"compile": mode}
    if setting.compile != "off":
        yield {"compile": "off", "compile_scope": "model", "activation_memory_budget": 1.0}


def _memory_budget(_: Wish, setting: TrainSetting) -> Iterator[Updates]:
    mode = setting.compile if setting.compile != "off" else "default"
    yield {"activation_memory_budget": 0.5, "compile": mode}


def _eight_bits(_: Wish, setting: TrainSetting) -> Iterator[Updates]:
    if setting.precision != "fp8":
        yield {"precision": "fp8"}


def _other_optimizers(_: Wish, setting: TrainSetting) -> Iterator[Updates]:
    for optimizer in ("adamw-8bit", "lion", "adafactor"):
        if optimizer.partition("-")[0] != setting.optimizer_family or "8bit" in optimizer:
            yield {"optimizer": optimizer}


def _adapters(_: Wish, setting: TrainSetting) -> Iterator[Updates]:
    if not setting.lora_rank:
        yield {"lora_rank": LORA_RANK}
        yield {"lora_rank": LORA_RANK, "lora_targets": "all"}


def _frozen_stages(wish: Wish, setting: TrainSetting) -> Iterator[Updates]:
    last = wish.model.num_stages if isinstance(wish.model, SwinConfig) else 2
    yield from ({"frozen_stages": n} for n in range(setting.frozen_stages + 1, last))


def _fewest_micro_batches(_: Wish, setting: TrainSetting) -> Iterator[Updates]:
    """One example: a search tries every divisor."""
    for num in range(2, setting.batch_size + 1):
        if setting.batch_size % num == 0:
            yield {"batch_size": setting.batch_size // num, "accumulate": num * setting.accumulate}
            return


# In the order in which a waterfall applies them.
LEVERS: tuple[Lever, ...] = (
    Lever("precision", ("precision",), "rounding", "adopt",
          "16 bits where they are enough", _lower_precisions, is_for_speed=True),
    Lever("fused optimizer", ("optimizer",), "rounding", "adopt",
          "one kernel for the update, without temporaries", _fused_optimizer, is_for_speed=True),
    Lever("allocator", (ALLOCATOR,), "nothing", "adopt",
          "segments that grow in place of new ones", lambda *_: [{ALLOCATOR: EXPANDABLE}]),
    Lever("memory format", ("memory_format",), "rounding", "adopt",
          "the layout of images and feature maps",
          _other_values("memory_format", "channels_last", "contiguous")),
    Lever("attention", ("attention",), "rounding", "either",
          "one kernel, or one per operation", _other_attentions),
    Lever("other optimizers", ("optimizer",), "recipe", "search",
          "less state per weight", _other_optimizers),
    Lever("pure bf16", ("precision",), "recipe", "search",
          "weights and optimizer state in bf16 too: small updates are lost",
          _other_values("precision", "pure-bf16"), is_for_speed=True),
    Lever("fp8", ("precision",), "recipe", "search",
          "linear layers multiply in 8 bits", _eight_bits, is_for_speed=True),
    Lever("adapters", ("lora_rank", "lora_targets"), "trained part", "search",
          "low-rank adapters in place of the weights", _adapters),
    Lever("frozen stages", ("frozen_stages",), "trained part", "search",
          "the first stages are not trained", _frozen_stages),
    Lever("optimizer in backward", ("optimizer_in_backward",), "nothing", "search",
          "each gradient is used and freed at once", _other_values("optimizer_in_backward", True),
          is_for_speed=True),
    Lever("offload", ("offload",), "nothing", "resort",
          "saved activations wait in the host's memory",
          _other_values("offload", "activations", "none")),
    Lever("checkpointing", ("checkpointing",), "nothing", "search",
          "activations are computed again in backward", _checkpointings),
    Lever("accumulation", ("batch_size", "accumulate"), "rounding", "micro-batch",
          "the images of a step in smaller micro-batches", _fewest_micro_batches),
    Lever("memory budget", ("activation_memory_budget",), "rounding", "search",
          "the compiler recomputes what is cheap", _memory_budget),
    Lever("compile", ("compile", "compile_scope", "activation_memory_budget"), "rounding", "search",
          "pointwise chains become one kernel", _compile_modes, is_for_speed=True),
)  # fmt: skip


REFERENCE = "a100-sxm-80gb"  # by its rates ways are ordered where only a memory is named
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

    def value(self, field: str) -> object:
        """The value of a field of the setting, or of the pseudo-field `allocator`."""
        if field == ALLOCATOR:
            return EXPANDABLE if self.expandable else None
        return getattr(self.setting, field)

    def differences(self, plain: TrainSetting) -> dict[str, object]:
        """The fields, the pseudo-field too, in which this is not `plain`, with their values."""
        allocator = {ALLOCATOR: EXPANDABLE} if self.expandable else {}
        return {**self.setting.differences(plain), **allocator}

    def updated(self, updates: Updates) -> Choice:
        """This choice with other values, unchecked; of the pseudo-field any value but None."""
        fields = {field: value for field, value in updates.items() if field != ALLOCATOR}
        expandable = updates.get(ALLOCATOR, self.value(ALLOCATOR)) is not None
        return Choice(self.setting.model_copy(update=fields), expandable)


@dataclass(frozen=True)
class Wish:
    """What a person asks for.

    `asked` is the setting as that person would run it. Every way must see `images_per_device_step`
    in one optimizer step on one device; None where the batch is free. `keep` are the fields that
    stay as they are, `allow` the effects that are welcome. The `target` has a GPU, or only a
    memory.
    """

    model: Model
    asked: TrainSetting
    target: Target
    images_per_device_step: int | None
    keep: frozenset[str]
    allow: frozenset[Effect]

    @property
    def rates_of(self) -> Gpu:
        """The card by whose rates ways are ordered."""
        return self.target.gpu or find_gpu(REFERENCE)

    @property
    def is_splittable(self) -> bool:
        """Whether the images of a step may be split into other micro-batches."""
        kept = {"batch_size", "accumulate", "rounding"}
        return self.images_per_device_step is not None and not self.keep & kept

    @property
    def keeps_batch(self) -> bool:
        """Whether every way has the micro-batch of the wish."""
        is_whole = self.images_per_device_step is not None and not self.is_splittable
        return is_whole or "batch_size" in self.keep

    @property
    def has_expandable_segments(self) -> bool:
        allocator = self.target.allocator
        return allocator is not None and allocator.expandable_segments

    @property
    def sample(self) -> Choice:
        """The wish at a micro-batch at which every lever can run; levers are tried on it."""
        if self.keeps_batch:
            return Choice(self.asked)
        batch = min(self.asked.batch_size, SAMPLE_BATCH)
        accumulate = 1 if self.is_splittable else self.asked.accumulate
        return Choice(self.asked).updated({"batch_size": batch, "accumulate": accumulate})

    def distance(self, choice: Choice) -> float:
        """How far the images of a step are from the wish's: 0 where they are the same."""
        images = choice.setting.images_per_device_step
        return abs(log(images / self.asked.images_per_device_step))

    def target_of(self, choice: Choice) -> Target:
        """The target, with the caching allocator's options under `choice`."""
        if not choice.expandable:
            return self.target
        base, source = self.target.allocator, "expandable segments"
        if base is not None:
            source = f"{base.source or 'the options given'}, and {source}"
        options = replace(base or AllocatorConfig(), expandable_segments=True, source=source)
        return replace(self.target, allocator=options)

    def changes(self, lever: Lever, choice: Choice) -> list[Updates]:
        """The changes of `lever` to `choice` that touch nothing that is to be kept."""
        if lever.effect in self.keep:
            return []
        updates = lever.changes(self, choice.setting)
        return [one for one in updates if not self._touches_what_is_kept(one, choice)]

    def is_used(self, lever: Lever, choice: Choice) -> bool:
        """Whether `choice` has one of the changes of `lever`. A field may belong to several."""
        changed = choice.differences(self.asked).keys() & set(lever.fields)
        if lever.role == "micro-batch":
            return "accumulate" in changed
        return bool(changed) and any(
            all(choice.value(field) == updates[field] for field in updates if field in lever.fields)
            for updates in self.changes(lever, self.sample)
        )

    def effects(self, choice: Choice) -> tuple[Effect, ...]:
        """What changes in the result when `choice` is run in place of the wish."""
        found = {lever.effect for lever in LEVERS if self.is_used(lever, choice)} - {"nothing"}
        if choice.setting.global_batch != self.asked.global_batch:
            found.add("learning rate")
        return tuple(effect for effect in EFFECTS if effect in found) or ("nothing",)

    def _touches_what_is_kept(self, updates: Updates, choice: Choice) -> bool:
        fields = self.keep & updates.keys()
        return any(f == ALLOCATOR or updates[f] != choice.value(f) for f in fields)

    def apply(self, choice: Choice, updates: Updates) -> Choice:
        """`choice` with `updates`. Raises UsageError or UnsupportedError where that cannot run."""
        from pydantic import ValidationError

        changed = choice.updated(updates)
        try:
            setting = TrainSetting.model_validate(changed.setting.model_dump())
        except ValidationError as error:
            refuse_faults(faults_between(error))
            laws = [str(fault["msg"]) for fault in error.errors()]  # of single fields
            raise UnsupportedError("; ".join(laws), "Choose values within these.") from None
        self.resolved(setting)
        if is_on_shapes(self.model, choice.setting) and not is_on_shapes(self.model, setting):
            raise UnsupportedError(NOT_COMPARED, "Ask 'planner estimate'.")
        return replace(changed, setting=setting)

    def resolved(self, setting: TrainSetting) -> ResolvedSetting:
        """The setting as the model's library runs it. Raises UnsupportedError where it does not."""
        check_precision(self.target.gpu, setting.precision)
        return resolve(self.model, setting)[1]


def read_wish(
    model: ModelLike,
    setting: SettingLike | None,
    target: Target,
    *,
    batch_size: int | None,
    global_batch: int | None,
    keep: Iterable[str],
    allow: Iterable[str],
    overrides: Mapping[str, Any],
) -> Wish:
    """The wish that the arguments of `planner.advise` mean. Raises UsageError for what cannot be
    read, UnsupportedError for what cannot run."""
    if target.budget_bytes is None:
        raise UsageError("advice needs a memory to fit into.", "Add --gpu NAME or --memory SIZE.")
    kept, allowed = _read_kept(keep), _read_allowed(allow)
    fields = dict(overrides)
    if batch_size is not None:
        fields["batch_size"] = batch_size
    micro_batch = _with_micro_batch(fields, global_batch)
    resolved_model, asked = read_resolved(model, setting, target.gpu, micro_batch)
    is_fixed = global_batch is not None or "batch_size" in fields or "learning rate" in kept
    is_fixed = is_fixed or isinstance(setting, TrainSetting) or "batch_size" in (setting or {})
    return Wish(
        model=resolved_model,
        asked=asked.model_copy(update={"attention": _named_attention(setting, fields)}),
        target=target,
        images_per_device_step=asked.images_per_device_step if is_fixed else None,
        keep=kept,
        allow=allowed,
    )


def _with_micro_batch(fields: Mapping[str, Any], global_batch: int | None) -> dict[str, Any]:
    """`fields` with one device's micro-batch of a global batch, split over the devices and the
    micro-batches that are named beside it."""
    gpus, accumulate = (str(fields.get(field, 1)) for field in ("world_size", "accumulate"))
    if global_batch is None or not (gpus + accumulate).isdecimal():
        return dict(fields)  # where all fields are checked, the one that is no number is named
    share = split_images(global_batch, int(gpus), int(accumulate), "batch_size" in fields)
    return {**fields, "batch_size": share}


def _named_attention(setting: SettingLike | None, fields: Mapping[str, Any]) -> object:
    """The attention that a person named; `library` where none was."""
    attention: object = fields.get("attention")
    if attention is None and isinstance(setting, TrainSetting):
        attention = setting.attention
    elif attention is None and isinstance(setting, Mapping):
        attention = setting.get("attention")
    return attention or "library"


def _read_kept(names: Iterable[str]) -> frozenset[str]:
    fields = {field for lever in LEVERS for field in lever.fields}
    known = sorted({*fields, *KEPT_EFFECTS})
    synonyms = {lever.name.replace(" ", "-"): lever.fields for lever in LEVERS}
    synonyms |= {"expandable-segments": ("allocator",), "batch": ("batch_size",)}
    synonyms["offload-activations"] = synonyms["offload"]
    kept: set[str] = set()
    for name in _split_names(names):
        if name.replace("-", "_") in (*TrainSetting.model_fields, *fields):
            kept.add(name.replace("-", "_"))
        elif name in KEPT_EFFECTS:
            kept.add(KEPT_EFFECTS[name])
        elif name in synonyms:
            kept.update(synonyms[name])
        else:
            way_out = f"Keep any of: {', '.join(known)}."
            raise unknown_name("field or effect to keep", name, known, way_out)
    return frozenset(kept)


def _read_allowed(names: Iterable[str]) -> frozenset[Effect]:
    allowed: set[Effect] = set(FAITHFUL)
    for name in _split_names(names):
        if name not in ALLOWED:
            raise unknown_name(
                "effect to allow", name, ALLOWED, f"Allow any of: {', '.join(ALLOWED)}."
            )
        allowed.add(ALLOWED[name])
    return frozenset(allowed)


def _split_names(names: Iterable[str]) -> list[str]:
    """The names, each in lower case with hyphens; a text is split at its commas."""
    texts = names.split(",") if isinstance(names, str) else names
    return [text.strip().casefold().replace("_", "-").replace(" ", "-") for text in texts]
