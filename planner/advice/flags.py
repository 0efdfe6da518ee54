"""A choice as `planner estimate` would be asked for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from planner.advice.wish import Choice, Wish
from planner.schema import TrainSetting
from planner.units import GIB

# Fields that have an option of their own; of the others --set takes the name.
OPTIONS = {
    "batch_size": "--batch-size", "accumulate": "--accumulate", "precision": "--precision",
    "checkpointing": "--checkpointing", "compile": "--compile", "attention": "--attention",
    "optimizer": "--optimizer", "world_size": "--gpus", "nodes": "--nodes",
    "parallelism": "--parallelism",
}  # fmt: skip


def flags(choice: Choice, allocator: str | None, precision: str) -> tuple[str, ...]:
    """The options that make `planner estimate` estimate `choice`; `precision` is what it would take
    by itself, `allocator` the text of the wish's options."""
    default = TrainSetting.model_validate({"precision": precision})
    found = ["--batch-size", str(choice.setting.batch_size)]
    for field, value in choice.setting.differences(default).items():
        if field == "batch_size":
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if field in OPTIONS:
            found += [OPTIONS[field], text]
        else:
            found += ["--set", f"{field}={text}"]
    options = [allocator] if allocator else []
    if choice.expandable:
        options.append("expandable_segments:True")
    if options:
        found += ["--allocator", ",".join(options)]
    return tuple(found)


def command(
    model: str, fields: Mapping[str, object], device: Iterable[str], chosen: Iterable[str]
) -> str:
    """A line for a shell: `planner estimate MODEL …`."""
    said = [part for field, value in fields.items() for part in ("--set", f"{field}={value}")]
    return shlex.join(["planner", "estimate", model, *said, *chosen, *device])


def device_flags(wish: Wish) -> tuple[str, ...]:
    found = ["--gpu", wish.gpu.name] if wish.gpu else []
    if wish.memory_bytes is not None:
        whole, rest = divmod(wish.memory_bytes, GIB)
        found += ["--memory", f"{wish.memory_bytes}B" if rest else f"{whole}GiB"]
    if wish.link is not None and wish.plain.world_size > 1:
        found += ["--link", wish.link]
    return tuple(found)
