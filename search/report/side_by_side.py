"""Several searches beside each other, and estimates beside searches of the same model."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.units import format_bytes
from planner.machine.hardware import recognise_gpu
from planner.report.page.contents import Cell, Group, Number, Part, Section, Table, Text
from planner.report.pages.side_by_side import Entry, compared, steps_beside
from planner.report.pages.step import Step
from planner.report.settings import describe_setting
from search.probe.evidence import rate_interval
from search.report.run import Run
from search.report.wording import bytes_cell, count_cell, date_text, rate_cell, share_cell

KEY = "beside"


def beside_group(subjects: Sequence[Step | Run]) -> Group:
    """The first group of a page of several subjects."""
    steps = [subject for subject in subjects if isinstance(subject, Step)]
    runs = [subject for subject in subjects if isinstance(subject, Run)]
    sections = steps_beside(steps, KEY) if len(steps) > 1 else []
    if len(runs) > 1:
        sections.append(runs_beside(runs, KEY))
    if steps and runs:
        sections.append(predicted_and_measured(steps, runs))
    return Group(KEY, "Side by side", sections)


def runs_beside(runs: Sequence[Run], key: str) -> Section:
    """What each search recommends, with its rate, its memory and what it was measured with."""
    known = [best for run in runs if (best := run.best) is not None]
    rates = [_world_rate(run.best) if run.best is not None else 0.0 for run in runs]
    same_work = len({best.model for best in known}) == 1
    said = "What each run recommends (of one that still runs, the best so far) and what differs."
    fastest = rates.index(max(rates)) if same_work else None
    entries = [_entry(run) for run in runs]
    parts = compared(entries, f"{runs[0].unit}/s", f"{key}-runs", said, fastest)
    return Section("runs", "Runs compared", parts)


def _entry(run: Run) -> Entry:
    """A run by what it recommends, or by what it probed where that is nothing."""
    best, found = run.best, run.found
    some = best or (run.records[-1] if run.records else None)
    fields: dict[str, object] = {}
    if some is not None:
        fields = {
            "model": some.model.title, "device": some.device.name,
            "device memory": format_bytes(some.device.total_bytes), "driver": some.device.driver,
            **(best.setting.model_dump() if best is not None else {}), **some.versions,
        }  # fmt: skip
    gain = found.gain if found is not None else None
    more: dict[str, Cell] = {
        "× plain default": Number(gain, f"{gain:.2f} ×" if gain is not None else "-"),
        "Probes": count_cell(found.num_probes if found is not None else len(run.records)),
        "Setting": (
            describe_setting(best.setting, best.model) if best is not None else "nothing fits yet"
        ),
        "Date": date_text(best.date) if best is not None else "-",
    }
    if best is None:
        return Entry(run.title, fields, None, run.budget_bytes, None, None, more)
    limit = run.budget_bytes or best.device.total_bytes
    interval = world_interval(best)
    return Entry(run.title, fields, best.used_bytes, limit, _world_rate(best), interval, more)


def predicted_and_measured(steps: Sequence[Step], runs: Sequence[Run]) -> Section:
    """Estimates beside what runs measured of the same model and setting."""
    rows = [
        _pair_row(step, run, record)
        for step in steps
        for run in runs
        for record in matching(step, run)
    ]
    headers = [
        "Model", "Setting", "Run", "Device", "Memory predicted", "Memory measured", "Error",
        "Rate predicted", "Rate measured", "Error",
    ]  # fmt: skip
    said = (
        "Probes of exactly the settings that are estimated on this page. On a CPU memory is what "
        "the process grew by, which is not what a GPU would hold."
    )
    none = (
        "No probe here has the model and setting of an estimate on its card: estimate the setting "
        "that a run recommends, with --gpu of its card, to compare the two."
    )
    parts: list[Part] = [Table(headers, rows, said) if rows else Text(none)]
    return Section("measured", "Predicted against measured", parts)


def matching(step: Step, run: Run) -> list[MeasurementRecord]:
    """Measured records of a step's model and setting, on its card where one is named."""
    setting = step.estimate.setting
    return [
        record
        for record in run.records
        if record.status == "measured"
        and record.model == step.estimate.model
        and _resolved(record.setting, setting) == setting
        and (
            step.gpu is None
            or recognise_gpu(record.device.name, record.device.total_bytes) == step.gpu
        )
    ]


def _resolved(setting: TrainSetting, like: TrainSetting) -> TrainSetting:
    """A record may leave the attention to the library, where an estimate names it."""
    if setting.attention == "library":
        return setting.model_copy(update={"attention": like.attention})
    return setting


def _pair_row(step: Step, run: Run, record: MeasurementRecord) -> list[Cell]:
    predicted = step.estimate
    time, needs = predicted.throughput, predicted.device_total_bytes
    rate, used = _world_rate(record), record.used_bytes
    foreseen = time.all_images_per_second if time is not None else None
    return [
        predicted.model.title,
        describe_setting(predicted.setting, predicted.model),
        run.title,
        record.device.name,
        *(bytes_cell(needs), bytes_cell(used), _error(needs, used)),
        *(rate_cell(foreseen), rate_cell(rate), _error(foreseen, rate)),
    ]


def _error(predicted: float | None, measured: float | None) -> Number:
    if not predicted or not measured:
        return Number(None, "-")
    return share_cell(predicted / measured - 1, "+.1%")


def world_interval(record: MeasurementRecord) -> tuple[float, float]:
    """Of all devices together."""
    rate = _world_rate(record)
    images = record.setting.batch_size * record.setting.accumulate * record.setting.world_size
    low, high = rate_interval(images, record.step_seconds) if record.step_seconds else (rate, rate)
    return min(low, rate), max(high, rate)


def _world_rate(record: MeasurementRecord) -> float:
    return record.world_images_per_second or 0.0
