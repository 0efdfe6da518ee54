"""The levers: what may be changed in a setting so that a step needs less memory or less time.

To add one, add a function that yields its changes and a line in `LEVERS`. A change is a mapping of
fields of a setting to their new values; the field `allocator` stands for the caching allocator's
options. A change may be one that the model, the card or this version cannot have: whoever tries it
finds out, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.libraries.names import find_library
from planner.machine.hardware.gpu import Gpu

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
