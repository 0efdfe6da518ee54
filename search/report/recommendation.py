"""What `planner tune` found, and how it goes on, as text."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.schema import TrainSetting
from planner.core.schema.loading import Feeding
from planner.core.schema.record import MeasurementRecord
from planner.core.schema.result import Recommendation
from planner.core.units import format_rate, format_seconds
from planner.report.page.contents import Section, Text
from planner.report.settings import describe_setting
from planner.report.terminal import table_text
from search.loop.progress_text import memory_text, rate_text
from search.probe.evidence import rate_interval
from search.report.run import Run
from search.report.wording import count, date_text, images_of

MAX_RULED_OUT = 12  # lines; recommendation.json has them all


def recommendation_text(found: Recommendation) -> str:
    """The setting with its evidence, the others, and what to know about the search."""
    answer = _nothing(found) if found.setting is None else _recommended(found, found.setting)
    probes = count(found.num_probes, "probe")
    ended = (
        f"{probes} of {found.num_candidates} settings; the search ended because "
        f"{found.stopped_because}.{_going_on(found)}"
    )
    notes = [f"- {note}" for note in (*found.notes, ended)]
    fed = ["", *feeding_lines(found.feeding, found.evidence)] if found.feeding else []
    return "\n".join([*answer, *fed, "", *notes, *_ruled_out(found)])


def feeding_lines(fed: Feeding, step: MeasurementRecord | None) -> list[str]:
    """What the data cost: the loader by itself, and the emitted script's own thirty steps."""
    data = fed.data
    alone = f"{format_rate(data.images_per_second)} images/s by itself, bound by its {data.bound}"
    lines = [f"Fed from {data.location} by {data.setting.title}: {alone}."]
    if fed.images_per_second is not None and fed.waited is not None:
        step_rate = step.images_per_second if step is not None else None
        share = f", {fed.images_per_second / step_rate:.0%} of the step alone" if step_rate else ""
        lines.append(
            f"  The emitted script trained {format_rate(fed.images_per_second)} images/s on them "
            f"({fed.steps} steps, measured){share}; waiting for data {fed.waited:.0%} of the time."
        )
    return [*lines, *(f"  {note}" for note in (*data.notes, *fed.notes))]


def feeding(run: Run) -> list[Section]:
    """The page's section of the data; none where they were not looked at."""
    found = run.found.feeding if run.found is not None else None
    if found is None or run.found is None:
        return []
    lines = feeding_lines(found, run.found.evidence)
    return [Section("feeding", "The data", [Text(line.strip()) for line in lines])]


def _going_on(found: Recommendation) -> str:
    """Where nothing ran its advice says what would help."""
    if "the budget" in found.stopped_because and found.setting is not None:
        return " Give a longer --budget to go on."
    return " Run the same command to go on." if "interrupted" in found.stopped_because else ""


def _nothing(found: Recommendation) -> list[str]:
    return [
        f"Nothing to recommend after {count(found.num_probes, 'probe')}: {found.stopped_because}.",
        found.advice,
    ]


def _recommended(found: Recommendation, setting: TrainSetting) -> list[str]:
    assert found.evidence is not None, "a recommended setting was measured"
    how = "memory measured, times predicted" if found.device.emulated else "measured"
    return [
        f"Recommended for {found.model.title} on {found.device.title} ({how}):",
        f"  {describe_setting(setting, found.model)}",
        f"  {_evidence(found.evidence)}",
        f"  {_gain(found)}",
        "",
        _table([found.evidence, *found.runners_up], found.baseline),
    ]


def _evidence(record: MeasurementRecord) -> str:
    low, high = rate_interval(images_of(record), record.step_seconds)
    num = len(record.step_seconds)
    return (
        f"{_world(record)}{rate_text(record)} ({low:.4g} to {high:.4g}, "
        f"{num} step{'s' * (num > 1)}), {memory_text(record)}, probe {record.probe_id[:8]} of "
        f"{date_text(record.date)}"
    )


def _world(record: MeasurementRecord) -> str:
    """What all devices reach together, before what one does; "" where there is one."""
    if record.world is None or record.world.world_size == 1:
        return ""
    return (
        f"{record.world_images_per_second or 0:.4g} {record.counts}/s of all "
        f"{record.world.world_size} "
        "devices; of each "
    )


def _gain(found: Recommendation) -> str:
    if found.baseline is None or found.gain is None:
        return "The plain default was not measured, so no speed-up is reported."
    setting = describe_setting(found.baseline.setting, found.model)
    return f"{found.gain:.2f} × the plain default ({setting}: {rate_text(found.baseline)})"


def _table(records: Sequence[MeasurementRecord], baseline: MeasurementRecord | None) -> str:
    rows = [[str(rank), *_cells(record)] for rank, record in enumerate(records, start=1)]
    if baseline is not None and baseline not in records:
        rows.append(["plain", *_cells(baseline)])
    headers = ("", "setting", f"{records[0].counts}/s", "step", "memory", "compile")
    return table_text(rows, headers, "lldl")


def _cells(record: MeasurementRecord) -> list[str]:
    compiling = record.compile_seconds
    rate = record.images_per_second or 0.0
    return [
        describe_setting(record.setting, record.model),
        f"{rate:.4g}",
        format_seconds(images_of(record) / rate) if rate else "-",
        memory_text(record),
        format_seconds(compiling) if compiling else "-",
    ]


def _ruled_out(found: Recommendation) -> list[str]:
    if not found.ruled_out:
        return []
    shown = found.ruled_out[:MAX_RULED_OUT]
    lines = [
        f"    {describe_setting(ruled.setting, found.model)}: {ruled.reason}" for ruled in shown
    ]
    more = len(found.ruled_out) - len(shown)
    if more:
        lines.append(f"    and {more} more, in recommendation.json")
    return ["- Not probed (these batches and larger ones):", *lines]
