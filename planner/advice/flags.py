"""The options with which `planner estimate` estimates a choice."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from planner.advice.wish import Choice, Wish
from planner.core.schema import SwinConfig, TrainSetting
from planner.core.units import exact_bytes
from planner.estimation.estimate import default_precision
from planner.machine.hardware.gpu import Gpu

# Fields that have an option of their own; of the others --set takes the name.
OPTIONS = {
    "batch_size": "--batch-size", "accumulate": "--accumulate", "precision": "--precision",
    "checkpointing": "--checkpointing", "compile": "--compile", "attention": "--attention",
    "optimizer": "--optimizer", "world_size": "--gpus", "nodes": "--nodes",
    "parallelism": "--parallelism",
}  # fmt: skip


def flags(choice: Choice, allocator: str | None, wish: Wish) -> tuple[str, ...]:
    """The options that make `planner estimate` estimate `choice`; `allocator` is the text of the
    wish's options."""
    options = [allocator] if allocator else []
    if choice.expandable:
        options.append("expandable_segments:True")
    setting = choice.setting.without_recipe(isinstance(wish.model, SwinConfig))
    chosen = setting_flags(setting, default_precision(wish.gpu))
    return (*chosen, *allocator_flags(",".join(options)))


def setting_flags(
    setting: TrainSetting, precision: str, own: Mapping[str, str] = OPTIONS
) -> tuple[str, ...]:
    """The options that mean `setting`, of a command whose fields have `own` options."""
    default = TrainSetting.model_validate({"precision": precision})
    found = ["--batch-size", str(setting.batch_size)]
    for field, value in setting.differences(default).items():
        if field == "batch_size":
            continue
        found += field_flags(field, (value,), own)
    return tuple(found)


def field_flags(
    field: str, values: Iterable[object], own: Mapping[str, str] = OPTIONS
) -> tuple[str, ...]:
    """The option that gives a field one value, or several to search; of those without one of their
    `own` --set takes the name."""
    text = ",".join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)
    return (own[field], text) if field in own else ("--set", f"{field}={text}")


def allocator_flags(options: str) -> tuple[str, ...]:
    return ("--allocator", options) if options else ()


def command(
    model: str,
    fields: Mapping[str, object],
    device: Iterable[str],
    chosen: Iterable[str],
    name: str = "estimate",
) -> str:
    """A line for a shell: `planner estimate MODEL …`."""
    said = [part for field, value in fields.items() for part in ("--set", f"{field}={value}")]
    return shlex.join(["planner", name, model, *said, *chosen, *device])


def device_flags(wish: Wish) -> tuple[str, ...]:
    link = wish.link if wish.plain.world_size > 1 else None
    return memory_flags(wish.gpu, wish.memory_bytes, link)


def memory_flags(gpu: Gpu | None, memory_bytes: int | None, link: str | None) -> tuple[str, ...]:
    """The device, the memory to fit into, and what joins several."""
    found = ["--gpu", gpu.name] if gpu else []
    if memory_bytes is not None:
        found += ["--memory", exact_bytes(memory_bytes)]
    if link is not None:
        found += ["--link", link]
    return tuple(found)
