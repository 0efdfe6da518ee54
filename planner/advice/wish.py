"""What a person asks for: a model, the images of a step, a memory, and what must stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any

from planner.advice.levers import ALLOCATOR, EFFECTS, FAITHFUL, LEVERS, Effect, Lever, Updates
from planner.core.errors import UnsupportedError, UsageError, unknown_name
from planner.core.schema import Model, ResolvedSetting, TrainSetting
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
from planner.machine.hardware.gpu import Gpu, check_precision, find_gpu
from planner.memory.allocator_config import AllocatorConfig

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
    chosen = allocator_here(allocator)
    return Wish(
        model=config,
        plain=_as_said(plain, setting, given),
        gpu=device,
        memory_bytes=memory,
        allocator=chosen,
        share=plain.batch_size * plain.accumulate if is_fixed else None,
        keep=kept,
        allow=allowed,
        link=link,
    )


def _split_batch(given: Mapping[str, Any], global_batch: int | None) -> dict[str, Any]:
    """A global batch, over the devices and the micro-batches that were named beside it."""
    if global_batch is None:
        return dict(given)
    gpus, parts = (int(given.get(field, 1)) for field in ("world_size", "accumulate"))
    return {**given, "batch_size": share_of(global_batch, gpus, parts, "batch_size" in given)}


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
    return [_word(name) for name in (names.split(",") if isinstance(names, str) else names)]


def _word(name: str) -> str:
    return name.strip().casefold().replace("_", "-").replace(" ", "-")
