"""Several searches beside each other, and estimates beside searches of the same model."""

from __future__ import annotations

from collections.abc import Sequence

from planner.hardware import recognise_gpu
from planner.page.contents import Cell, Chart, Group, Links, Number, Part, Section, Table, Text
from planner.page.plotting import BLUE, GREY, ORANGE, plot_text
from planner.report.pages.bars import bars_figure, bars_height, limit_marks
from planner.report.pages.differences import Fields, differing, field_text, field_title
from planner.report.pages.side_by_side import steps_beside
from planner.report.pages.step import Step
from planner.report.settings import describe_setting
from planner.schema import MeasurementRecord, TrainSetting
from planner.schema.loading import LoaderSetting
from planner.units import GIB, format_bytes
from search.probe.evidence import rate_interval
from search.report.run import Run
from search.report.wording import (
    bytes_cell,
    count_cell,
    date_text,
    interval_text,
    rate_cell,
    share_cell,
)

KEY = "beside"


def beside_group(subjects: Sequence[Step | Run], shown: Sequence[tuple[str, str]] = ()) -> Group:
    """The first group of a page of several subjects. `shown` are the groups of those that the page
    also shows one by one: (title, key)."""
    steps = [subject for subject in subjects if isinstance(subject, Step)]
    runs = [subject for subject in subjects if isinstance(subject, Run)]
    sections = steps_beside(steps, KEY) if len(steps) > 1 else []
    steps_of = [run for run in runs if run.loaders is None or run.records or run.found is not None]
    if len(steps_of) > 1:
        sections += runs_beside(steps_of, KEY)
    loaders = [run for run in runs if run.loaders is not None]
    if len(loaders) > 1:
        sections.append(loaders_beside(loaders))
    if steps and steps_of:
        sections.append(predicted_and_measured(steps, steps_of))
    if shown:
        sections.append(Section("each", "One by one", [Links(shown)]))
    return Group(KEY, "Side by side", sections)


def runs_beside(runs: Sequence[Run], key: str) -> list[Section]:
    """What each search recommends, with its rate, its memory and what it was measured with."""
    parts: list[Part] = [_runs_table(runs)]
    settings = _settings(runs)
    if settings.rows:
        parts.append(settings)
    sections = [Section("runs", "Runs compared", parts)]
    if any(run.best for run in runs):
        figures: list[Part] = [
            _rates(runs, f"{key}-run-rates"), _memory(runs, f"{key}-run-memory"),
        ]  # fmt: skip
        sections.append(Section("run-rates", "Measured rate and memory of each run", figures))
    sections.append(_versions(runs))
    return sections


def loaders_beside(runs: Sequence[Run]) -> Section:
    """The loader that each search found."""
    rows: list[list[Cell]] = []
    for run in runs:
        best = run.best_loader
        rate = best.images_per_second if best is not None else None
        rows.append(
            [
                run.title,
                loader_text(best.setting) if best is not None else "nothing loads yet",
                rate_cell(rate),
                (best.bound or "-") if best is not None else "-",
            ]
        )
    said = "The loader that each run recommends, or its best so far."
    table = Table(["Run", "Loader", "Images/s", "Bound by"], rows, said)
    return Section("loaders", "Loaders compared", [table])


def loader_text(setting: LoaderSetting) -> str:
    """`torchvision, batch 64, 8 workers`."""
    return f"{setting.pipeline}, batch {setting.batch_size}, {setting.workers} workers"


def _runs_table(runs: Sequence[Run]) -> Table:
    headers = [
        "Run", "Images/s", "95% interval", "× plain default", "Memory", "Probes", "Setting",
        "Model", "Device", "Date",
    ]  # fmt: skip
    rows = [_run_row(run) for run in runs]
    rates = [(_world_rate(best) if (best := run.best) else 0.0) for run in runs]
    marked = [rates.index(max(rates))] if any(rates) and _same_work(runs) else []
    said = "What each run recommends; of one that still runs, the best so far."
    return Table(headers, rows, said, marked)


def _run_row(run: Run) -> list[Cell]:
    best, found = run.best, run.found
    some = best or (run.records[0] if run.records else None)
    model = some.model if some is not None else found.model if found is not None else None
    device = some.device if some is not None else found.device if found is not None else None
    gain = found.gain if found is not None else None
    rate = _world_rate(best) if best is not None else None
    within = world_interval(best) if best is not None else None
    return [
        run.title,
        rate_cell(rate),
        Number(within[0] if within else None, interval_text(within) or "-"),
        Number(gain, f"{gain:.2f} ×" if gain is not None else "-"),
        bytes_cell(best.used_bytes if best is not None else None),
        count_cell(run.found.num_probes if run.found is not None else len(run.records)),
        describe_setting(best.setting) if best is not None else "nothing fits yet",
        model.title if model is not None else "-",
        device.name if device is not None else "-",
        date_text(best.date) if best is not None else "-",
    ]


def _settings(runs: Sequence[Run]) -> Table:
    """The fields in which the recommended settings differ."""
    known = [(run, best) for run in runs if (best := run.best) is not None]
    columns = differing([best.setting.model_dump() for _, best in known])
    names = list(columns[0]) if columns else []
    rows: list[list[Cell]] = [
        [run.title, *(field_text(value) for value in fields.values())]
        for (run, _), fields in zip(known, columns, strict=True)
    ]
    said = "The fields in which the recommended settings differ."
    return Table(["Run", *map(field_title, names)], rows if names else [], said)


def _same_work(runs: Sequence[Run]) -> bool:
    """Whether rates can be compared: all of one model."""
    return len({best.model for run in runs if (best := run.best) is not None}) == 1


def _rates(runs: Sequence[Run], key: str) -> Chart:
    from plotly.graph_objects import Bar

    known = [(run, best) for run in runs if (best := run.best) is not None]
    between = [world_interval(best) for _, best in known]
    rates = [_world_rate(best) for _, best in known]
    trace = Bar(
        y=[plot_text(run.title) for run, _ in known],
        x=rates,
        orientation="h",
        marker={"color": BLUE},
        error_x={
            "type": "data", "symmetric": False, "thickness": 1.5, "color": GREY,
            "array": [high - rate for (_, high), rate in zip(between, rates, strict=True)],
            "arrayminus": [rate - low for (low, _), rate in zip(between, rates, strict=True)],
        },
        customdata=[plot_text(describe_setting(best.setting)) for _, best in known],
        hovertemplate="%{y}<br>%{x:.4g} a second<br>%{customdata}<extra></extra>",
    )  # fmt: skip
    figure = bars_figure([trace], f"{known[0][0].unit}/s", [run.title for run, _ in known])
    said = "Measured rate of what each run recommends, with its 95% interval."
    return Chart(key, figure, said, bars_height(len(known)))


def _memory(runs: Sequence[Run], key: str) -> Chart:
    from plotly.graph_objects import Bar

    known = [(run, best) for run in runs if (best := run.best) is not None]
    names = [plot_text(run.title) for run, _ in known]
    limits = [run.budget_bytes or best.device.total_bytes for run, best in known]
    traces = [
        Bar(
            name="taken",
            y=names,
            x=[(best.used_bytes or 0) / GIB for _, best in known],
            orientation="h",
            marker={"color": ORANGE},
            customdata=[bytes_cell(best.used_bytes).text for _, best in known],
            hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        ),
        limit_marks([run.title for run, _ in known], limits, "allowed, or what the device has"),
    ]
    figure = bars_figure(traces, "GiB", [run.title for run, _ in known])
    said = "What the recommended setting of each run took, and what it may take."
    if any(best.device.kind == "cpu" for _, best in known):
        said += " On a CPU it is what the process grew by."
    return Chart(key, figure, said, bars_height(len(known)))


def _versions(runs: Sequence[Run]) -> Section:
    """The devices and versions in which the runs differ."""
    fields = [_environment(run) for run in runs]
    apart = differing(fields)
    names = list(apart[0]) if apart else []
    if not names:
        text = "All runs were measured on one kind of device with the same versions."
        return Section("versions", "Versions", [Text(text)])
    rows: list[list[Cell]] = [
        [name, *(field_text(fields.get(name)) for fields in apart)] for name in names
    ]
    said = "Devices and versions in which the runs differ: a rate may differ by them."
    return Section("versions", "Versions", [Table(["What", *(r.title for r in runs)], rows, said)])


def _environment(run: Run) -> Fields:
    record = run.best or (run.records[-1] if run.records else None)
    if record is None:
        return dict(run.found.versions) if run.found is not None else {}
    device = record.device
    return {
        "device": device.name,
        "device memory": format_bytes(device.total_bytes),
        "driver": device.driver,
        **record.versions,
    }


def predicted_and_measured(steps: Sequence[Step], runs: Sequence[Run]) -> Section:
    """Estimates beside what runs measured of the same model and setting."""
    rows: list[list[Cell]] = []
    for step in steps:
        for run in runs:
            for record in matching(step, run):
                rows.append(_pair_row(step, run, record))
    title = "Predicted against measured"
    if not rows:
        return Section("measured", title, [Text(_why_none(steps, runs))])
    headers = [
        "Model", "Setting", "Run", "Device", "Memory predicted", "Memory measured", "Error",
        "Rate predicted", "Rate measured", "Error",
    ]  # fmt: skip
    said = "Probes of exactly the settings that are estimated on this page."
    parts: list[Part] = [Table(headers, rows, said)]
    if any(record.device.kind == "cpu" for run in runs for record in run.records):
        parts.append(
            Text(
                "On a CPU memory is what the process grew by, which is not what a GPU would hold.",
                "note",
            )
        )
    return Section("measured", title, parts)


def matching(step: Step, run: Run) -> list[MeasurementRecord]:
    """Measured records of a step's model and setting, on its card where one is named."""
    setting = step.estimate.setting
    return [
        record
        for record in run.records
        if record.status == "measured"
        and record.model == step.estimate.model
        and _resolved(record.setting, setting) == setting
        and (step.gpu is None or _is_card(step, record))
    ]


def _resolved(setting: TrainSetting, like: TrainSetting) -> TrainSetting:
    """A record may leave the attention to the library, where an estimate names it."""
    if setting.attention == "library":
        return setting.model_copy(update={"attention": like.attention})
    return setting


def _is_card(step: Step, record: MeasurementRecord) -> bool:
    return recognise_gpu(record.device.name, record.device.total_bytes) == step.gpu


def _pair_row(step: Step, run: Run, record: MeasurementRecord) -> list[Cell]:
    predicted = step.estimate
    time = predicted.throughput
    rate, used = _world_rate(record), record.used_bytes
    foreseen = time.all_images_per_second if time is not None else None
    return [
        predicted.model.title,
        describe_setting(predicted.setting),
        run.title,
        record.device.name,
        bytes_cell(predicted.device_total_bytes),
        bytes_cell(used),
        _error(predicted.device_total_bytes, used),
        rate_cell(foreseen),
        rate_cell(rate),
        _error(foreseen, rate),
    ]


def _why_none(steps: Sequence[Step], runs: Sequence[Run]) -> str:
    models = {record.model for run in runs for record in run.records}
    if not any(step.estimate.model in models for step in steps):
        return "No run here measured a model that is estimated here: there is nothing to compare."
    return (
        "No probe here has the setting of an estimate on its card: estimate the setting that a run "
        "recommends, with --gpu of its card, to compare the two."
    )


def _error(predicted: float | None, measured: float | None) -> Number:
    if not predicted or not measured:
        return Number(None, "-")
    return share_cell(predicted / measured - 1, "+.1%")


def world_interval(record: MeasurementRecord) -> tuple[float, float]:
    """Of all devices together."""
    images = record.setting.batch_size * record.setting.accumulate * record.setting.world_size
    if not record.step_seconds:
        return (_world_rate(record),) * 2
    low, high = rate_interval(images, record.step_seconds)
    return min(low, _world_rate(record)), max(high, _world_rate(record))


def _world_rate(record: MeasurementRecord) -> float:
    return record.world_images_per_second or 0.0
