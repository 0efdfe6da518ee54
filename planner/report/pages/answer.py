"""The first section: whether it fits, what it is of, and the commands that say the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.advice.flags import OPTIONS, allocator_flags, command, memory_flags, setting_flags
from planner.estimation import default_precision, resolve
from planner.page.contents import Copyable, Facts, Part, Section, Text
from planner.report.settings import describe_setting
from planner.report.tables import unit, verdict
from planner.schema import TrainSetting
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.report.pages.step import Step

# The fields that have options of their own in `planner advise`.
_OF_ADVISE = {field: OPTIONS[field] for field in ("world_size", "nodes", "parallelism")}


def answer(step: Step) -> Section:
    """The verdict, the figures, the setting, and what to type."""
    estimate = step.estimate
    parts: list[Part] = [
        Text(verdict(estimate), "lead"),
        Facts(_figures(step), "tiles"),
        Facts(
            [
                ("Model", f"{estimate.model.title}: {estimate.num_parameters:,} parameters"),
                ("Setting", describe_setting(estimate.setting)),
                *([("GPU", step.gpu.title)] if step.gpu is not None else []),
                ("Peak", estimate.peak_at),
            ]
        ),
        Copyable(said_again(step, "estimate"), "The same in a terminal"),
    ]
    if estimate.budget_bytes is not None:
        parts.append(
            Copyable(said_again(step, "advise"), "What would lower the peak, and at what cost")
        )
    else:
        parts.append(
            Text("planner advise MODEL --gpu NAME says what would lower the peak.", "note")
        )
    return Section("answer", "Answer", parts)


def said_again(step: Step, name: str) -> str:
    """`planner NAME …` for what the step is of. `estimate` and `advise` take different options."""
    estimate = step.estimate
    setting = _as_said(step)
    own = _OF_ADVISE if name == "advise" else OPTIONS
    link = step.link if setting.world_size > 1 else None
    chosen = setting_flags(setting, default_precision(step.gpu), own)
    config = step.allocator.source if step.allocator is not None else ""
    return command(
        step.said or estimate.model.title,
        step.fields,
        memory_flags(step.gpu, step.memory_bytes, link),
        (*chosen, *allocator_flags(_options(config))),
        name,
    )


def _as_said(step: Step) -> TrainSetting:
    """The setting, without the attention that the library takes by itself."""
    setting = step.estimate.setting
    plain = setting.model_copy(update={"attention": "library"})
    _, resolved = resolve(step.estimate.model, plain)
    return plain if resolved.attention == setting.attention else setting


def _options(source: str) -> str:
    """The allocator's options in what an `AllocatorConfig` says of its source: `--allocator X`,
    `PYTORCH_ALLOC_CONF=X`, or only `X`."""
    name, _, rest = source.partition("=")
    return rest if name.isupper() else source.removeprefix("--allocator ")


def _figures(step: Step) -> list[tuple[str, str]]:
    """The few to be seen first."""
    estimate = step.estimate
    found = [
        ("device total", format_bytes(estimate.device_total_bytes)),
        ("allocated at most", format_bytes(estimate.peak_allocated_bytes)),
    ]
    if estimate.headroom_bytes is not None:
        spare = estimate.headroom_bytes
        found.insert(1, ("to spare" if spare >= 0 else "too much", format_bytes(abs(spare))))
    if estimate.throughput is not None:
        found.append((f"{unit(estimate.model)}/s, predicted", _rate(step)))
    return found


def _rate(step: Step) -> str:
    time = step.estimate.throughput
    assert time is not None
    return f"{time.all_images_per_second:,.0f} ±{time.uncertainty:.0%}"
