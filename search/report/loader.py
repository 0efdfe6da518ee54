"""The page's section of a search for a loader: which one, its code, what bounds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.page.contents import (
    Chart,
    Copyable,
    Facts,
    Folded,
    Number,
    Part,
    Section,
    Table,
    Text,
)
from planner.page.plotting import CYCLE, VERMILION, new_figure, plot_text
from planner.report.feeding import describe_data
from planner.report.settings import describe_setting
from planner.schema.loading import (
    STAGES,
    DataRecommendation,
    LoaderRecord,
    LoaderSetting,
    StepRate,
)
from planner.units import format_bytes, format_seconds
from search.report.answer import faults_of
from search.report.loader_probes import loader_table, order_chart
from search.report.marks import legend_below, named_point, points
from search.report.run import LoaderRun, Run
from search.report.wording import (
    count,
    date_text,
    hover,
    rate_text,
    seconds_text,
    within_text,
)

_SHAPES = ("circle", "square", "diamond", "triangle-up", "pentagon")


def loader(run: Run, key: str) -> list[Section]:
    """The search for a loader; none where there was none."""
    if run.loaders is None:
        return []
    held, best = run.loaders, run.loaders.best
    parts: list[Part] = [Text(sentence(held, best), "plain" if run.records else "lead")]
    if not run.records:
        parts += faults_of(run)
    if best is not None:
        parts += [Copyable(loader_code(best.setting), "The loader"), Facts(_facts(best))]
    if held.found is not None:
        parts += _advice(held.found)
    if any(record.images_per_second for record in held.records):
        parts.append(workers_chart(held, f"{key}-workers"))
    parts += _stages(held.records, f"{key}-stages")
    if len(held.records) > 1:
        parts.append(order_chart(held.records, f"{key}-loader-order"))
    parts.append(loader_table(held.records, best))
    return [Section("loader", "Loader", parts)]


def sentence(held: LoaderRun, best: LoaderRecord | None) -> str:
    """The answer in one sentence."""
    found = held.found
    probes = count(found.num_probes if found else len(held.records), "probe")
    if best is None:
        data = held.records[0].data if held.records else None
        where = found.data.location if found else data.location if data else "the data"
        why = f" {found.advice}" if found else ""
        return f"Nothing loads {where} after {probes}.{why}"
    so_far = "Load" if found else f"Best of {probes}: load"
    bound = f", bound by {best.bound}" if best.bound else ""
    return (
        f"{so_far} {describe_data(best.data)} with {best.setting.title}: "
        f"{rate_text(best.images_per_second)} images/s{within_text(best)}{bound}."
    )


def loader_code(setting: LoaderSetting) -> str:
    """The loader as one writes it."""
    height, width = setting.image_size
    given = [
        f"    {name}={value!r}," for name, value in setting.arguments.items() if value is not None
    ]
    return "\n".join(
        [
            "from torch.utils.data import DataLoader",
            "",
            f"# dataset: {height}×{width} px, by the pipeline {setting.pipeline!r}",
            "loader = DataLoader(",
            "    dataset,",
            *given,
            "    shuffle=True,",
            "    drop_last=True,",
            ")",
        ]
    )


def _facts(best: LoaderRecord) -> list[tuple[str, str]]:
    def size(number: int | None) -> str:
        return format_bytes(number, 0) if number else "-"

    proof = f"probe {best.probe_id[:8]} of {date_text(best.date)}" if best.probe_id else "-"
    facts = [
        (
            "Proof",
            f"{proof}, {count(len(best.batch_seconds), 'batch', 'batches')}",
        ),
        ("Processor time of an image", seconds_text(best.cpu_seconds_per_image)),
        ("First batch after", seconds_text(best.first_batch_seconds)),
        ("Memory of a worker", size(best.worker_bytes)),
        ("Memory of the main process", size(best.main_bytes)),
        ("Shared memory", size(best.shared_memory_bytes)),
    ]
    processor = best.host.get("processor")
    cpus = best.host.get("usable_cpus") or best.host.get("num_cpus")
    machine = f"{processor or 'not known'}, {cpus} processors" if cpus else str(processor or "-")
    if best.cold_share:
        facts.append(("Read from the disk", f"{best.cold_share:.0%} of the bytes"))
    versions = ", ".join(f"{name} {version}" for name, version in sorted(best.versions.items()))
    return [*facts, ("Machine", machine), ("Software", versions or "-")]


def _advice(found: DataRecommendation) -> list[Part]:
    """What bounds, what would load faster, what is in the way."""
    parts: list[Part] = [Text(line) for line in found.notes]
    parts += [Text(line) for line in _step_lines(found.step)]
    if found.ways_out:
        parts.append(Folded("What would load faster", [Text(line) for line in found.ways_out]))
    parts += [Text(line, "warning") for line in found.warnings]
    if found.faults:
        rows = [(f.item, f.message, Number(f.count, str(f.count))) for f in found.faults]
        parts.append(Folded(f"Cannot be loaded: {count(len(rows), 'item')}",
                            [Table(("item", "why", "times"), rows)]))  # fmt: skip
    if found.left_out:
        parts.append(Folded("Left out", [Text(line) for line in found.left_out]))
    ended = f"The search ended because {found.stopped_because}." if found.stopped_because else ""
    return [*parts, Text(ended, "note")] if ended else parts


def _step_lines(step: StepRate | None) -> list[str]:
    if step is None:
        return []
    said = (
        f"A step of {step.model} on {step.gpu} is predicted to take "
        f"{rate_text(step.images_per_second)} images/s (±{step.uncertainty:.0%}, "
        f"{describe_setting(step.setting)}): the {step.bound} bounds."
    )
    if step.bound == "step" or step.needed_cpus is None:
        return [said]
    return [f"{said} To feed it takes about {step.needed_cpus:.3g} processors."]


def workers_chart(run: LoaderRun, key: str) -> Chart:
    """Images/s by workers, a line for each pipeline and number of batches ahead."""
    groups: dict[tuple[str, int | None, bool], list[LoaderRecord]] = {}
    for record in run.records:
        if record.status == "measured" and record.images_per_second is not None:
            setting = record.setting
            kind = (setting.pipeline, setting.prefetch_factor, setting.pin_memory)
            groups.setdefault(kind, []).append(record)
    pipelines = list(dict.fromkeys(kind[0] for kind in groups))
    ahead = sorted({kind[1] or 0 for kind in groups})
    traces = [
        _line(kind, held, pipelines.index(kind[0]), ahead.index(kind[1] or 0))
        for kind, held in sorted(groups.items(), key=lambda g: (g[0][0], g[0][1] or 0, g[0][2]))
    ]
    traces += [_named(run, run.best)] if run.best is not None else []
    layout = {
        "xaxis": {
            "title": {"text": "workers"},
            "dtick": 1 if _most_workers(run.records) <= 16 else None,
        },
        "yaxis": {"title": {"text": "images/s"}, "rangemode": "tozero"},
        "legend": legend_below(),
        "hovermode": "closest",
    }
    described = "Images/s of the loaders by their workers, a line for each way to load."
    if run.best is not None:
        described += " The star is the plainest that noise cannot tell from the fastest."
    return Chart(key, new_figure(traces, **layout), described, 400 + 12 * len(groups))


def _most_workers(records: Sequence[LoaderRecord]) -> int:
    return max((record.setting.workers for record in records), default=0)


def _line(
    kind: tuple[str, int | None, bool], held: list[LoaderRecord], colour: int, shape: int
) -> dict[str, Any]:
    pipeline, ahead, pinned = kind
    held = sorted(held, key=lambda record: record.setting.workers)
    dash = "dot" if pinned else "solid"
    name = f"{pipeline}, {f'{ahead} batches ahead' if ahead else 'no workers'}"
    return points(
        (record.setting.workers for record in held),
        (record.images_per_second for record in held),
        map(loader_hover, held),
        mode="lines+markers",
        name=plot_text(name + (", pinned" if pinned else "")),
        line={"color": CYCLE[colour % len(CYCLE)], "width": 1, "dash": dash},
        marker={"symbol": _SHAPES[shape % len(_SHAPES)], "size": 8},
    )


def _named(run: LoaderRun, best: LoaderRecord) -> dict[str, Any]:
    """The recommended one, by shape and by word."""
    name = "recommended" if run.found is not None else "best so far"
    mark = {"symbol": "star", "size": 18, "color": VERMILION}
    rate = best.images_per_second or 0.0
    side = "left" if best.setting.workers > _most_workers(run.records) / 2 else "right"
    said, place = loader_hover(best), f"bottom {side}"
    return named_point(name, best.setting.workers, rate, said, place, mark, legendrank=1)


def loader_hover(record: LoaderRecord) -> str:
    return hover(
        [
            record.setting.title,
            f"{rate_text(record.images_per_second)} images/s{within_text(record)}",
            f"bound by {record.bound}" if record.bound else "",
        ]
    )


def _stages(records: Sequence[LoaderRecord], key: str) -> list[Part]:
    """What the stages of one image cost, of each pipeline that was timed."""
    timed = {r.setting.pipeline: r for r in records if r.stage_seconds}
    if not timed:
        return []
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": stage,
            "x": [1e3 * record.stage_seconds.get(stage, 0.0) for record in timed.values()],
            "y": [plot_text(pipeline) for pipeline in timed],
            "marker": {"color": CYCLE[number]},
            "hovertext": [
                f"{stage}: {format_seconds(record.stage_seconds.get(stage, 0.0))} an image"
                for record in timed.values()
            ],
            "hoverinfo": "text",
        }
        for number, stage in enumerate(STAGES)
        if any(record.stage_seconds.get(stage) for record in timed.values())
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "ms an image, one process"}},
        "legend": {**legend_below(), "traceorder": "normal"},
    }
    said = "What the stages of one image take, timed in one process without others."
    return [Chart(key, new_figure(traces, **layout), said, 190 + 40 * len(timed))]
