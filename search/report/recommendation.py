"""What `planner tune` found, and how it goes on, as an answer."""

from __future__ import annotations

from planner.core.schema import TrainSetting
from planner.core.schema.loading import Feeding
from planner.core.schema.record import MeasurementRecord
from planner.core.schema.result import Recommendation
from planner.core.units import format_rate
from planner.report.estimates import apart_fields, notes
from planner.report.page.contents import Cell, Part, Section, Table, Text
from planner.report.settings import describe_setting, in_words
from search.loop.progress_text import memory_text, rate_text
from search.report.run import Run
from search.report.wording import (
    bytes_cell,
    count,
    date_text,
    images_of,
    rate_cell,
    seconds_cell,
    within_text,
)

# What is said of these is on a first screen; the other notes are folded.
FIRST_NOTES = ("learning rate", "nothing was run", "last record is in", "Other processes hold")


def recommendation_answer(found: Recommendation, then: str = "") -> list[Part]:
    """The setting with its evidence, the others beside it, and what to type next; folded, what else
    is to be known of the search."""
    answer = _nothing(found) if found.setting is None else _recommended(found, found.setting)
    fed = feeding_lines(found.feeding, found.evidence) if found.feeding else []
    probes = count(found.num_probes, "probe")
    ended = (
        f"{probes} of {found.num_candidates} settings; the search ended because "
        f"{found.stopped_because}.{_going_on(found)}"
    )
    first = [note for note in found.notes if any(word in note for word in FIRST_NOTES)]
    ruled_out = (
        f"{describe_setting(ruled.setting, found.model)}: {ruled.reason}"
        for ruled in found.ruled_out
    )
    return [
        Text("\n".join([*answer, *fed])),
        *_table(found),
        Text("\n".join([*first, ended])),
        *([Text(then)] if then else []),
        *notes("notes", [*(n for n in found.notes if n not in first), *_proof(found.evidence)]),
        *notes("not probed (these batches and larger ones)", ruled_out),
    ]


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
    gain = "the plain default was not measured"
    if found.baseline is not None and found.gain is not None:
        gain = f"{found.gain:.2f} × the plain default"
    record = found.evidence
    return [
        f"Recommended for {found.model.title} on {found.device.title} ({how}):",
        f"  {_world(record)}{rate_text(record)}{within_text(record)}, {gain}, "
        f"{memory_text(record)}",
        f"  {describe_setting(setting, found.model)}",
    ]


def _world(record: MeasurementRecord) -> str:
    """What all devices reach together, before what one does; "" where there is one."""
    if record.world is None or record.world.world_size == 1:
        return ""
    return (
        f"{record.world_images_per_second or 0:.4g} {record.counts}/s of all "
        f"{record.world.world_size} devices; of each "
    )


def _proof(record: MeasurementRecord | None) -> list[str]:
    if record is None:
        return []
    steps = count(len(record.step_seconds), "step")
    return [f"Proof: probe {record.probe_id[:8]} of {date_text(record.date)}, {steps} timed."]


def _table(found: Recommendation) -> list[Part]:
    """The recommended, the others and the plain default, by what tells them apart."""
    if found.evidence is None:
        return []
    records = [found.evidence, *found.runners_up]
    baseline = found.baseline
    if baseline is not None and baseline not in records:
        records.append(baseline)
    apart = apart_fields([record.setting for record in records])
    rows: list[list[Cell]] = [
        [
            str(rank),
            rate_cell(rate),
            seconds_cell(images_of(record) / rate if rate else None),
            bytes_cell(record.used_bytes),
            seconds_cell(record.compile_seconds),
            in_words({field: getattr(record.setting, field) for field in apart})
            + (" (plain default)" if record == baseline else ""),
        ]
        for rank, record in enumerate(records, start=1)
        for rate in [record.images_per_second]
    ]
    headers = ("", f"{records[0].counts}/s", "step", "memory", "compile", "setting")
    return [Table(headers, rows, marked=(0,), first=8).filled()]
