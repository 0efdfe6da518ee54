"""The page's section of a search for a loader: which one, its code, what bounds it."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.schema.loading import (
    STAGES,
    DataRecommendation,
    LoaderRecord,
    LoaderSetting,
)
from planner.core.units import format_bytes, format_rate, format_seconds
from planner.report.data import step_lines
from planner.report.feeding import describe_data
from planner.report.page.contents import (
    Cell,
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
from planner.report.page.plotting import CYCLE, LEGEND_ABOVE, new_figure, plot_text
from search.report.answer import faults_of
from search.report.run import LoaderRun, Run
from search.report.statistics import axes_parts, history_parts
from search.report.wording import (
    bytes_cell,
    count,
    date_text,
    end_of,
    flags_text,
    interval_of,
    interval_text,
    rate_cell,
    reason_text,
    seconds_cell,
    seconds_text,
    within_text,
)


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
    parts += axes_parts(held.records, "images", None, f"{key}-loader")
    parts += _stages(held.records, f"{key}-stages")
    parts += history_parts(held.records, "images", None, f"{key}-loader-order")
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
        f"{format_rate(best.images_per_second)} images/s{within_text(best)}{bound}."
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
    parts += [Text(line) for line in step_lines(found.step, found.evidence)]
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
        "legend": LEGEND_ABOVE,
    }
    said = "What the stages of one image take, timed in one process without others."
    return [Chart(key, new_figure(traces, **layout), said, 190 + 40 * len(timed))]


def loader_table(records: Sequence[LoaderRecord], best: LoaderRecord | None) -> Table:
    """Every probe."""
    headers = (
        "probe", "loader", "images/s", "ended", "interval", "bound by", "CPU an image",
        "a worker", "shared memory", "first batch", "took", "date", "flags",
    )  # fmt: skip
    rows = [_probe_row(number, record) for number, record in enumerate(records, start=1)]
    marked = [i for i, r in enumerate(records) if best is not None and r.setting == best.setting]
    return Table(headers, rows, "Every probe of a loader.", marked).filled()


def _probe_row(number: int, record: LoaderRecord) -> list[Cell]:
    return [
        Number(number, str(number)),
        record.setting.title,
        rate_cell(record.images_per_second),
        reason_text(end_of(record, None), record.message),
        interval_text(interval_of(record)) or "-",
        record.bound or "-",
        seconds_cell(record.cpu_seconds_per_image),
        bytes_cell(record.worker_bytes),
        bytes_cell(record.shared_memory_bytes),
        seconds_cell(record.first_batch_seconds),
        seconds_cell(record.probe_seconds),
        date_text(record.date),
        flags_text(record.flags),
    ]
