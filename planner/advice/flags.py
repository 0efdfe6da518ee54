"""The options with which `planner estimate` estimates a choice."""

import shlex
from collections.abc import Iterable, Mapping

from planner.advice.wish import Choice, Wish
from planner.core.errors import UnsupportedError
from planner.core.schema import SwinConfig, TrainSetting
from planner.core.schema.validation import declared_options
from planner.core.units import exact_bytes
from planner.estimation.arguments import Target
from planner.estimation.estimate import Estimate, default_precision, resolve

# Fields that have an option of their own; of the others --set takes the name.
OPTIONS = {name: said.flag_of(name) for name, said in declared_options(TrainSetting).items()}


def flags(choice: Choice, allocator: str | None, wish: Wish) -> tuple[str, ...]:
    """The options that make `planner estimate` estimate `choice`; `allocator` is the text of the
    wish's options."""
    options = [allocator] if allocator else []
    if choice.expandable:
        options.append("expandable_segments:True")
    setting = choice.setting.without_recipe(isinstance(wish.model, SwinConfig))
    chosen = setting_flags(setting, default_precision(wish.target.gpu))
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


def device_flags(target: Target, world_size: int) -> tuple[str, ...]:
    """The device, the memory to fit into, and what joins several."""
    found = ["--gpu", target.gpu.name] if target.gpu else []
    if target.memory_bytes is not None:
        found += ["--memory", exact_bytes(target.memory_bytes)]
    if target.link is not None and world_size > 1:
        found += ["--link", target.link]
    return tuple(found)


# The fields that have options of their own in `planner advise`.
_OF_ADVISE = {field: OPTIONS[field] for field in ("world_size", "nodes", "parallelism")}


def command_of(
    name: str, estimate: Estimate, said: str, fields: Mapping[str, str], target: Target
) -> str:
    """`planner NAME …` for an estimate of a model, as it was `said`. `estimate` and `advise` take
    different options."""
    setting = _as_said(estimate)
    own = _OF_ADVISE if name == "advise" else OPTIONS
    chosen = setting_flags(setting, default_precision(target.gpu), own)
    config = target.allocator.source if target.allocator is not None else ""
    return command(
        said or estimate.model.title,
        fields,
        device_flags(target, setting.world_size),
        (*chosen, *allocator_flags(_options(config))),
        name,
    )


def _as_said(estimate: Estimate) -> TrainSetting:
    """The setting, without the recipe and the attention that the model has by itself."""
    setting = estimate.setting.without_recipe(isinstance(estimate.model, SwinConfig))
    plain = setting.model_copy(update={"attention": "library"})
    try:
        _, resolved = resolve(estimate.model, plain)
    except UnsupportedError:  # the model's own attention takes no such batch
        return setting
    return plain if resolved.attention == setting.attention else setting


def _options(source: str) -> str:
    """The allocator's options in what an `AllocatorConfig` says of its source: `--allocator X`,
    `PYTORCH_ALLOC_CONF=X`, or only `X`."""
    name, _, rest = source.partition("=")
    return rest if name.isupper() else source.removeprefix("--allocator ")
