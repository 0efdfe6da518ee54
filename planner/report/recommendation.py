"""What `planner tune` found, and how it goes on, as text."""

from __future__ import annotations

from collections.abc import Sequence

from planner.report.feeding import feeding_text
from planner.report.progress import memory_text
from planner.report.settings import describe_setting
from planner.schema import TrainSetting
from planner.schema.record import MeasurementRecord
from planner.schema.result import Recommendation
from planner.units import format_seconds
from search.probe.evidence import rate_interval

MAX_RULED_OUT = 12  # lines; recommendation.json has them all
HEADERS = ("", "setting", "images/s", "step", "memory", "compile")


def recommendation_text(found: Recommendation) -> str:
    """The setting with its evidence, the others, and what to know about the search."""
    answer = _nothing(found) if found.setting is None else _recommended(found, found.setting)
    ended = (
        f"{_probes(found)} of {found.num_candidates} settings; the search ended because "
        f"{found.stopped_because}." + _going_on(found.stopped_because)
    )
    notes = [f"- {note}" for note in (*found.notes, ended)]
    fed = ["", *feeding_text(found.feeding)] if found.feeding else []
    return "\n".join([*answer, *fed, "", *notes, *_ruled_out(found)])


def _going_on(stopped_because: str) -> str:
    if "the budget" in stopped_because:
        return " Give a longer --budget to go on."
    return " Run the same command to go on." if "interrupted" in stopped_because else ""


def _nothing(found: Recommendation) -> list[str]:
    return [
        f"Nothing to recommend after {_probes(found)}: {found.stopped_because}.",
        found.advice,
    ]


def _recommended(found: Recommendation, setting: TrainSetting) -> list[str]:
    assert found.evidence is not None, "a recommended setting was measured"
    return [
        f"Recommended for {found.model.title} on {found.device.name} (measured):",
        f"  {describe_setting(setting)}",
        f"  {_evidence(found.evidence)}",
        f"  {_gain(found)}",
        "",
        _table([found.evidence, *found.runners_up], found.baseline),
    ]


def _probes(found: Recommendation) -> str:
    return "1 probe" if found.num_probes == 1 else f"{found.num_probes} probes"


def _evidence(record: MeasurementRecord) -> str:
    low, high = rate_interval(_images(record), record.step_seconds)
    return (
        f"{_world(record)}{record.images_per_second or 0:.4g} images/s ({low:.4g} to {high:.4g}, "
        f"{len(record.step_seconds)} steps), {memory_text(record)}, probe {record.probe_id[:8]} of "
        f"{record.date[:16].replace('T', ' ')}"
    )


def _world(record: MeasurementRecord) -> str:
    """What all devices reach together, before what one does; "" where there is one."""
    if record.world is None or record.world.world_size == 1:
        return ""
    return (
        f"{record.world_images_per_second or 0:.4g} images/s of all {record.world.world_size} "
        "devices; of each "
    )


def _gain(found: Recommendation) -> str:
    if found.baseline is None or found.gain is None:
        return "The plain default was not measured, so no speed-up is reported."
    return (
        f"{found.gain:.2f} × the plain default ({describe_setting(found.baseline.setting)}: "
        f"{found.baseline.images_per_second or 0:.4g} images/s)"
    )


def _table(records: Sequence[MeasurementRecord], baseline: MeasurementRecord | None) -> str:
    from tabulate import tabulate

    rows = [[str(rank), *_cells(record)] for rank, record in enumerate(records, start=1)]
    if baseline is not None and baseline not in records:
        rows.append(["plain", *_cells(baseline)])
    return tabulate(rows, headers=HEADERS, tablefmt="simple")


def _cells(record: MeasurementRecord) -> list[str]:
    compiling = record.compile_seconds
    rate = record.images_per_second or 0.0
    return [
        describe_setting(record.setting),
        f"{rate:.4g}",
        format_seconds(_images(record) / rate) if rate else "-",
        memory_text(record),
        format_seconds(compiling) if compiling else "-",
    ]


def _images(record: MeasurementRecord) -> int:
    """Of one optimizer step on one device."""
    return record.setting.batch_size * record.setting.accumulate


def _ruled_out(found: Recommendation) -> list[str]:
    if not found.ruled_out:
        return []
    shown = found.ruled_out[:MAX_RULED_OUT]
    lines = [f"    {describe_setting(ruled.setting)}: {ruled.reason}" for ruled in shown]
    more = len(found.ruled_out) - len(shown)
    if more:
        lines.append(f"    and {more} more, in recommendation.json")
    return ["- Not probed (these batches and larger ones):", *lines]
