"""What `planner data` found, and how it goes on, as text."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.schema.loading import DataRecommendation, LoaderRecord, StepRate
from planner.core.units import format_bytes, format_seconds
from planner.report.settings import describe_setting
from planner.report.terminal import table_text

HEADERS = ("", "loader", "images/s", "CPU an image", "a worker", "/dev/shm", "start", "bound by")
MAX_ROWS, MAX_FAULTS = 12, 8  # lines; data.json has them all


def data_text(found: DataRecommendation) -> str:
    """The loader with its evidence, the others, what bounds, and the ways out."""
    parts = [_nothing(found) if found.setting is None else _recommended(found)]
    parts += [step_lines(found.step, found.evidence)]
    parts += [_listed("What would load faster:", found.ways_out)]
    parts += [_listed("In the way:", found.warnings)]
    parts += [_fault_lines(found)]
    ended = f"{_probes(found)} of {found.num_candidates} loaders; the search ended because"
    notes = (*found.left_out, *found.notes, f"{ended} {found.stopped_because}.")
    parts += [[f"- {note}" for note in dict.fromkeys(notes)]]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _nothing(found: DataRecommendation) -> list[str]:
    return [
        f"Nothing loads {found.data.location} after {_probes(found)}: {found.stopped_because}.",
        found.advice,
    ]


def _recommended(found: DataRecommendation) -> list[str]:
    setting, evidence = found.setting, found.evidence
    assert setting is not None, "asked for"
    assert evidence is not None, "a recommended loader was measured"
    height, width = setting.image_size
    return [
        f"Recommended for {_data(found)} (measured):",
        f"  {setting.title}",
        f"  {evidence.images_per_second or 0:.4g} images/s, batches of {setting.batch_size} of "
        f"{height}×{width} px, probe {evidence.probe_id[:8]} of "
        f"{evidence.date[:16].replace('T', ' ')}",
        "",
        *_table(evidence, found.runners_up),
    ]


def _data(found: DataRecommendation) -> str:
    items = found.data.num_items
    count = f", {items:,} items" if items is not None else ""
    made = " made by planner" if found.data.synthetic else ""
    return f"{found.data.location} ({found.data.kind}{count}{made})"


def _table(evidence: LoaderRecord, others: Sequence[LoaderRecord]) -> list[str]:
    shown = [evidence, *others][:MAX_ROWS]
    rows = [[str(rank), *_cells(record)] for rank, record in enumerate(shown, start=1)]
    more = 1 + len(others) - len(shown)
    rest = [f"and {more} more, in data.json"] if more > 0 else []
    return [table_text(rows, HEADERS), *rest]


def _cells(record: LoaderRecord) -> list[str]:
    def size(count: int | None) -> str:
        return format_bytes(count, 0) if count else "-"

    def seconds(value: float | None) -> str:
        return format_seconds(value) if value else "-"

    return [
        record.setting.title.removesuffix(", persistent"),
        f"{record.images_per_second or 0:.4g}",
        seconds(record.cpu_seconds_per_image),
        size(record.worker_bytes) if record.setting.workers else "-",
        size(record.shared_memory_bytes) if record.setting.workers else "-",
        seconds(record.first_batch_seconds),
        record.bound or "-",
    ]


def step_lines(step: StepRate | None, evidence: LoaderRecord | None) -> list[str]:
    """Which of a predicted step and the loader bounds; nothing where no step was named."""
    if step is None:
        return []
    low, high = (step.images_per_second * (1 + sign * step.uncertainty) for sign in (-1, 1))
    lines = [
        f"A step of {step.model} on {step.gpu} takes {step.images_per_second:.4g} images/s "
        f"({low:.4g} to {high:.4g}; predicted, {describe_setting(step.setting)})."
    ]
    rate = evidence.images_per_second if evidence else None
    if rate is not None and low < rate < high:
        return [*lines, f"{rate:.4g} images/s are in that range: either of the two may bound."]
    if step.bound == "step":
        return [*lines, "The step is the limit: this loader brings enough."]
    cpus = step.needed_cpus
    need = "" if cpus is None else f" To feed it takes about {cpus:.3g} processors."
    return [*lines, f"The loader is the limit: the device would wait for images.{need}"]


def _listed(head: str, lines: Sequence[str]) -> list[str]:
    return [head, *(f"- {line}" for line in lines)] if lines else []


def _fault_lines(found: DataRecommendation) -> list[str]:
    shown = found.faults[:MAX_FAULTS]
    lines = [f"{f.item}: {f.message}" + (f" ({f.count} times)" * (f.count > 1)) for f in shown]
    more = len(found.faults) - len(shown)
    return _listed(
        "Cannot be loaded:", [*lines, *([f"and {more} more, in data.json"] * (more > 0))]
    )


def _probes(found: DataRecommendation) -> str:
    return "1 probe" if found.num_probes == 1 else f"{found.num_probes} probes"
