"""The first section: whether it fits, what it is of, and the commands that say the same."""

from __future__ import annotations

from collections.abc import Mapping

from planner.advice.flags import OPTIONS, allocator_flags, command, memory_flags, setting_flags
from planner.core.schema import SwinConfig, TrainSetting
from planner.core.units import format_bytes
from planner.estimation.estimate import Estimate, default_precision, resolve
from planner.machine.hardware.gpu import Gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.report.page.contents import Cell, Copyable, Facts, Number, Part, Section, Table, Text
from planner.report.pages.step import Step
from planner.report.settings import describe_setting, in_words
from planner.report.verdicts import is_shown_as_running, verdict_of

# The fields that have options of their own in `planner advise`.
_OF_ADVISE = {field: OPTIONS[field] for field in ("world_size", "nodes", "parallelism")}


def answer(step: Step) -> Section:
    """The verdict, the figures, the setting, and what to type."""
    estimate = step.estimate
    parts: list[Part] = [
        verdict_of(estimate),
        Facts(_figures(step), "tiles"),
        Text("An estimate: nothing was run."),
        *_ways(step),
        Facts(
            [
                ("Model", f"{estimate.model.title}: {estimate.num_parameters:,} parameters"),
                ("Setting", describe_setting(estimate.setting, estimate.model)),
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
    """`planner NAME …` for what the step is of."""
    return said_of(
        name, step.estimate, step.said, step.fields, step.gpu, step.memory_bytes, step.link,
        step.allocator,
    )  # fmt: skip


def said_of(
    name: str, estimate: Estimate, said: str, fields: Mapping[str, str], gpu: Gpu | None,
    memory_bytes: int | None, link: str | None, allocator: AllocatorConfig | None,
) -> str:  # fmt: skip
    """`planner NAME …` for an estimate of a model, as it was `said`. `estimate` and `advise` take
    different options."""
    setting = _as_said(estimate)
    own = _OF_ADVISE if name == "advise" else OPTIONS
    chosen = setting_flags(setting, default_precision(gpu), own)
    config = allocator.source if allocator is not None else ""
    return command(
        said or estimate.model.title,
        fields,
        memory_flags(gpu, memory_bytes, link if setting.world_size > 1 else None),
        (*chosen, *allocator_flags(_options(config))),
        name,
    )


def _as_said(estimate: Estimate) -> TrainSetting:
    """The setting, without the recipe and the attention that the model has by itself."""
    setting = estimate.setting.without_recipe(isinstance(estimate.model, SwinConfig))
    plain = setting.model_copy(update={"attention": "library"})
    _, resolved = resolve(estimate.model, plain)
    return plain if resolved.attention == setting.attention else setting


def _options(source: str) -> str:
    """The allocator's options in what an `AllocatorConfig` says of its source: `--allocator X`,
    `PYTORCH_ALLOC_CONF=X`, or only `X`."""
    name, _, rest = source.partition("=")
    return rest if name.isupper() else source.removeprefix("--allocator ")


def _figures(step: Step) -> list[tuple[str, str]]:
    """The few to be seen first."""
    estimate = step.estimate
    budget, spare = estimate.budget_bytes, estimate.headroom_bytes
    of = f" of {format_bytes(budget)}" if budget is not None else ""
    found = [(f"needed{of}", format_bytes(estimate.device_total_bytes))]
    if spare is not None:
        found.append(("free" if spare >= 0 else "too much", format_bytes(abs(spare))))
    if estimate.throughput is not None and is_shown_as_running(estimate):
        found.append((f"{estimate.unit}/s, predicted", _rate(estimate)))
    if step.largest is not None:
        sure = "" if step.largest.fits_surely else ", probably"
        found.append((f"largest batch that fits{sure}", f"{step.largest.setting.batch_size:,}"))
    return found


def _rate(estimate: Estimate) -> str:
    time = estimate.throughput
    assert time is not None, "asked for"
    return f"{time.all_images_per_second:,.0f} ±{time.uncertainty:.0%}"


def _ways(step: Step) -> list[Part]:
    """What else would fit, the best first, and the command of that."""
    if not step.ways:
        return []
    what = step.estimate.unit
    rows: list[list[Cell]] = []
    for way in step.ways:
        found = way.estimate
        rate, needs = found.throughput, found.device_total_bytes
        rows.append([
            in_words(dict(way.changes)) or "as it is",
            verdict_of(found),
            Number(rate.all_images_per_second, _rate(found)) if rate else Number(None, "-"),
            Number(needs, format_bytes(needs)),
        ])  # fmt: skip
    said = f"What fits instead, with the same {what} in a step, from planner advise."
    memory = memory_flags(step.gpu, step.memory_bytes, None)
    name = step.said or step.estimate.model.title
    best = command(name, step.fields, memory, step.ways[0].flags)
    headers = ["Change", "Fits", f"{what}/s, predicted", "Memory"]
    return [Table(headers, rows, said, [0]), Copyable(best, "The first of these")]
