"""Estimates for a terminal and a page: one in full (`estimate_answer`), or several as rows of a
table (`rows_answer`).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

from planner.core.schema import TrainSetting
from planner.core.units import format_bytes, format_range, format_seconds
from planner.estimation.estimate import Estimate
from planner.estimation.scaling import Scaled
from planner.memory.compiled import has_known_graphs
from planner.report import timing
from planner.report.page import contents as doc
from planner.report.text import describe_fields, describe_setting
from planner.throughput.result import Throughput, is_slower

NOT_RECORDED = "not recorded"
ASSUMED_GPU = "; an A100's kernels are assumed"  # as `overheads_for` does where no GPU is named
RECORDING_HELPS = "Compile is not recorded: --record narrows the range, in one to three minutes."
# In the order in which people add up: tensors first, then what PyTorch and the driver add to them.
BREAKDOWN_ROWS = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "temporaries": "temporaries",
    "workspace": "library workspaces",
    "allocator_overhead": "allocator overhead",
    "cuda_context": "CUDA context",
    "communication": "NCCL's own buffers",
}
NUM_NAMED = 5  # categories of the breakdown on a first screen; the others are summed up
MAX_NOTES = 10  # notes under a table of several rows
Column = tuple[str, Callable[["EstimateRow"], doc.Cell]]  # its header, and the cell of a row
NextCommand = Callable[[Estimate], str]  # the command that goes on from an estimate, "" for none


def estimate_verdict(estimate: Estimate) -> doc.Verdict:
    """Whether it fits, and the reason: `Needs 5.00 GiB (4.73–5.27 GiB) of 23.52 GiB.`"""
    return doc.Verdict(_verdict_kind(estimate), _verdict_reason(estimate))


def verdict_text(estimate: Estimate, when: str = "") -> str:
    """The verdict as one sentence: `Fits: needs 5.00 GiB (4.73–5.27 GiB) of 23.52 GiB.`"""
    verdict = estimate_verdict(estimate)
    return f"{verdict.word}{when}: {verdict.text[0].lower()}{verdict.text[1:]}"


def is_shown_as_running(estimate: Estimate) -> bool:
    """Whether to show a rate: a step that does not fit does not run."""
    return estimate.fits is not False


def total_text(estimate: Estimate) -> str:
    """The device total, or its range for a compiled step that was not recorded."""
    if estimate.as_eager:
        return range_text(estimate)
    return format_bytes(estimate.device_total_bytes)


def range_text(estimate: Estimate) -> str:
    return format_range(estimate.low_bytes, estimate.high_bytes)


def needs_text(estimate: Estimate) -> str:
    """`5.00 GiB (4.73–5.27 GiB)`"""
    total, total_range = total_text(estimate), range_text(estimate)
    return total if total == total_range else f"{total} ({total_range})"


def _verdict_kind(estimate: Estimate) -> doc.VerdictKind:
    if estimate.fits is None or estimate.budget_bytes is None:
        return "unknown"
    if estimate.fits:
        return "fits" if estimate.fits_surely else "likely"
    return "unlikely" if estimate.low_bytes <= estimate.budget_bytes else "no"


def _verdict_reason(estimate: Estimate) -> str:
    text, budget = f"Needs {needs_text(estimate)}", estimate.budget_bytes
    text += "" if budget is None else f" of {format_bytes(budget)}"
    text += "" if estimate.gpu else ASSUMED_GPU
    if budget is None:
        text += ". No memory was named: pass --gpu NAME or --memory SIZE"
    elif estimate.num_alloc_retries:
        text += ", only by freeing cached memory, which is slower"
    return f"{text}."


def narrowing_advice(estimate: Estimate) -> str:
    """How to narrow the range of a compiled step that is estimated by the eager step's ledger."""
    if has_known_graphs(estimate.setting):
        return RECORDING_HELPS
    return "Only 'planner tune' narrows the range: this compiled step cannot be recorded."


def peak_text(estimate: Estimate) -> str:
    """The place of the peak: `backward of layers.3.blocks.1.mlp.fc1, in torch's mm kernel`."""
    return re.sub(r" \((\w+)\)", r", in torch's \1 kernel", estimate.peak_at)


def estimate_answer(
    estimate: Estimate, next_command: NextCommand, remarks: Sequence[str] = ()
) -> list[doc.Part]:
    """The verdict, the rate, the model and its setting, where the bytes and the seconds go, and
    what to type next; folded, all else. `remarks` are further lines of the first paragraph."""
    largest_sizes = sorted(estimate.breakdown.items(), key=lambda item: -item[1])
    sizes = dict(largest_sizes[:NUM_NAMED])
    sizes["other"] = sum(num_bytes for _, num_bytes in largest_sizes[NUM_NAMED:])
    in_order = {key: estimate.breakdown.get(key, 0) for key in BREAKDOWN_ROWS}
    inputs = {"aten.randn": f"input {estimate.unit}"}
    largest = [
        (path or inputs.get(label, "in no module"), label.removeprefix("aten."), doc.bytes_cell(n))
        for path, label, n in estimate.largest_at_peak
    ]
    subject = f"{estimate.model.title}, {estimate.num_parameters:,} parameters: "
    subject += describe_setting(estimate.setting, estimate.model)
    unrecorded = [narrowing_advice(estimate)] if estimate.as_eager else []
    lines = [*_rate_lines(estimate), subject, *_cost_lines(estimate), *unrecorded, *remarks]
    time = estimate.throughput
    limits = [] if time is None else [f"{timing.bound_text('the step', time.bound_seconds)}."]
    place, _, _ = estimate.peak_at.partition(" (")  # without torch's name of the operation
    compiled = "of the step without compile " if estimate.as_eager else ""
    caption = f"Where the {format_bytes(estimate.device_total_bytes)} {compiled}go (peak: {place})"
    return [
        estimate_verdict(estimate),
        doc.Text("\n".join(lines)),
        doc.Table(("", "", ""), _breakdown_rows(estimate, sizes), caption),
        doc.Text("\n".join([_script_figures(estimate), *limits])),
        *([doc.Copyable(next_command(estimate), "Next")] if next_command(estimate) else []),
        doc.Folded("memory at the peak in full", [
            doc.Text(f"The peak is in {peak_text(estimate)}."),
            doc.Table(("", "", ""), _breakdown_rows(estimate, in_order)),
            totals_table(estimate),
        ]),
        *([doc.Folded("largest tensors", [doc.Table(("", "", ""), largest)])] if largest else []),
        *_time_part(estimate),
        *folded_notes("assumed", estimate.assumed),
        *folded_notes("left out", estimate.left_out),
    ]  # fmt: skip


def folded_notes(title: str, lines: Iterable[str]) -> list[doc.Part]:
    """The lines of notes that belong to an answer, folded; nothing if there are none."""
    text = "\n".join(f"- {line}" for line in lines)
    return [doc.Folded(title, [doc.Text(text)])] if text else []


def predicted_rate_text(predicted: Throughput, unit: str) -> str:
    """`1,132 images/s, likely 736–1,528`; `8,151 images/s on 8 GPUs (1,019 each), likely …`"""
    rate, error, gpus = predicted.all_images_per_second, predicted.uncertainty, predicted.devices
    devices = f" on {gpus} GPUs ({rate / gpus:,.0f} each)" if gpus > 1 else ""
    return (
        f"{'' if predicted.is_whole else 'up to '}{rate:,.0f} {unit}/s{devices}, "
        f"likely {rate * (1 - error):,.0f}–{rate * (1 + error):,.0f}"
    )


def _rate_lines(estimate: Estimate) -> list[str]:
    predicted = estimate.throughput
    if predicted is None:
        return []
    text = "" if is_shown_as_running(estimate) else "With enough memory: "
    text += predicted_rate_text(predicted, estimate.unit)
    return [f"{text}; {format_seconds(predicted.step_seconds)} a step. Predicted, not measured."]


def _cost_lines(estimate: Estimate) -> list[str]:
    if estimate.cost is None:
        return []
    training, hours = timing.training_text(estimate.cost), timing.hours_text(estimate.cost)
    return [f"{training} {estimate.unit}: {hours}; {timing.LEFT_OUT}."]


def _breakdown_rows(estimate: Estimate, sizes: Mapping[str, int]) -> list[list[doc.Cell]]:
    """Each category of `sizes` with its bytes and its share of the total, unless it is empty."""
    titles = {**BREAKDOWN_ROWS, "other": "everything else"}
    if estimate.setting.parallelism == "ddp":
        titles["gradients"] = "gradients, DDP buckets"
    return [
        [titles[key], doc.bytes_cell(size), doc.share_cell(size, estimate.device_total_bytes)]
        for key, size in sizes.items() if size
    ]  # fmt: skip


def _script_figures(estimate: Estimate) -> str:
    if estimate.as_eager:
        return "In your script: not known of a compiled step that is not recorded."
    sizes = {"allocated": estimate.peak_allocated_bytes, "reserved": estimate.peak_reserved_bytes}
    figures = (f"max_memory_{name} {format_bytes(size)}" for name, size in sizes.items())
    return f"In your script: {', '.join(figures)}."


def totals_table(estimate: Estimate) -> doc.Table:
    """The four totals, each with what it adds to the one before; the saved activations; and the
    pinned memory of the host."""
    outside = "CUDA context" + (", NCCL" if "communication" in estimate.breakdown else "")
    stages = [
        ("peak live", estimate.peak_live_bytes, "tensors alive at once"),
        ("peak allocated", estimate.peak_allocated_bytes, "workspaces, block rounding"),
        ("peak reserved", estimate.peak_reserved_bytes, "free memory that is kept"),
        ("device total", estimate.device_total_bytes, f"{outside} (as nvidia-smi)"),
    ]
    rows: list[Sequence[doc.Cell]] = []
    previous = 0
    for name, num_bytes, adds in stages:
        added = num_bytes - previous
        text = f"+ {format_bytes(added)}" if previous else ""
        rows.append((name, doc.bytes_cell(num_bytes), doc.Number(added, text), adds))
        previous = num_bytes
    saved = "from forward to backward, of one micro-batch"
    none = doc.Number(None, "")
    rows.append(("saved", doc.bytes_cell(estimate.saved_activation_bytes), none, saved))
    if estimate.pinned_host_bytes:
        needs = "the optimizer" if estimate.setting.offload_optimizer != "none" else "backward"
        purpose = f"of the host's memory, for what {needs} needs"
        rows.append(("pinned", doc.bytes_cell(estimate.pinned_host_bytes), none, purpose))
    return doc.Table(("total", "size", "more", "which adds"), rows)


def _time_part(estimate: Estimate) -> list[doc.Part]:
    predicted = estimate.throughput
    if predicted is None:
        return []
    basis = doc.Text(f"±{predicted.uncertainty:.0%}: {predicted.basis}.")
    facts = doc.Facts(timing.time_facts(predicted, estimate.unit, is_shown_as_running(estimate)))
    return [doc.Folded("time", [basis, facts, *timing.time_parts(predicted)])]


_COLUMN_FIELDS = ("world_size", "nodes", "parallelism")  # these have columns of their own


@dataclass(frozen=True)
class EstimateRow:
    """One of several estimates. `differences` holds the fields that distinguish it from the others,
    `scaled` compares it with one device, and `sizes` are the largest batches of its kind."""

    estimate: Estimate
    differences: dict[str, object] = field(default_factory=dict)
    scaled: Scaled | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The differences that no column of their own shows: `batch 32, compile default`."""
        shown = (*_COLUMN_FIELDS, *(["batch_size"] if self.sizes else []))
        return describe_fields({f: v for f, v in self.differences.items() if f not in shown})

    @property
    def rate(self) -> float:
        """The rate of all devices together; 0 where no rate is predicted."""
        predicted = self.estimate.throughput
        return predicted.all_images_per_second if predicted else 0.0


def rows_answer(
    estimates: Sequence[Estimate], next_command: NextCommand, remarks: Sequence[str] = (),
    scaled: Sequence[Scaled] = (), sizes: Sequence[Mapping[str, int]] = (),
) -> list[doc.Part]:  # fmt: skip
    """Which of several estimates to take, what they have in common, a row for each, and what to
    type next; folded, their other figures and their notes. `scaled` and `sizes` hold one entry for
    each estimate, as `EstimateRow` does."""
    rows = _rows(estimates, scaled or repeat(None), sizes or repeat({}))
    fastest = _equally_fast(rows)
    keys = _key_columns(rows)
    has_labels = any(row.label for row in rows)
    labels: list[Column] = [("setting", lambda row: row.label)] if has_labels else []
    columns = [*keys, *_figure_columns(rows), *labels]
    marked = [rows.index(row) for row in fastest[:1]]
    best = fastest[0] if fastest else min(rows, key=lambda row: row.estimate.device_total_bytes)
    command = next_command(best.estimate)
    lead = _largest_batch_lead(best) if sizes else _lead(rows, fastest)
    return [
        doc.Text("\n".join([lead, _common_text(estimates), *remarks])),
        _table(rows, columns, caption="The largest batches:" if sizes else "", marked=marked),
        *([doc.Copyable(command, "Next")] if command else []),
        doc.Folded("memory of each", [_table(rows, [*keys, *_memory_columns(rows), *labels])]),
        *_step_part(rows, keys, labels),
        *folded_notes("how sure the figures are", range_notes(estimates)),
        *folded_notes("assumed", _merge_notes([e.assumed for e in estimates])),
        *folded_notes("left out", _merge_notes([e.left_out for e in estimates])),
    ]


def _rows(estimates: Sequence[Estimate], *extras: Iterable[Any]) -> list[EstimateRow]:
    fields = differing_fields([e.setting for e in estimates])
    differences = [{name: getattr(e.setting, name) for name in fields} for e in estimates]
    return list(map(EstimateRow, estimates, differences, *extras))


def row_names(estimates: Sequence[Estimate]) -> list[str]:
    """A name for each estimate, by its differences: `rtx-4090, batch 32`; numbered where there are
    none."""
    rows = _rows(estimates)
    names = [_row_name(row, rows) if len(rows) > 1 else row.estimate.model.title for row in rows]
    return [
        name if names.count(name) == 1 else f"{name} #{number}"
        for number, name in enumerate(names, start=1)
    ]


def differing_fields(settings: Sequence[TrainSetting]) -> list[str]:
    """The fields in which the settings differ."""
    return [f for f in TrainSetting.model_fields if len({getattr(s, f) for s in settings}) > 1]


def _equally_fast(rows: Sequence[EstimateRow]) -> list[EstimateRow]:
    """The fastest row that fits, and those that are as fast within the error: first those that
    surely fit, then those that shard nothing, then the fastest. Empty where no row fits or no rate
    is known. Rows of largest batches without rates all count as equally fast, the largest first."""
    candidates = [r for r in rows if r.estimate.fits is not False and (r.rate or r.sizes)]
    fastest = max(candidates, key=lambda row: row.rate, default=None)

    def rank(row: EstimateRow) -> tuple[bool, bool, float, int]:
        setting, unsure = row.estimate.setting, row.estimate.fits_surely is False
        return unsure, setting.parallelism not in ("none", "ddp"), -row.rate, -setting.batch_size

    return sorted((row for row in candidates if fastest and _is_as_fast(row, fastest)), key=rank)


def _is_as_fast(row: EstimateRow, fastest: EstimateRow) -> bool:
    """Whether two rates are equal within the error; on different cards, whether they read the
    same."""
    kind, other = ((e.gpu, e.model, e.setting.world_size) for e in (row.estimate, fastest.estimate))
    time, best = row.estimate.throughput, fastest.estimate.throughput
    if kind == other and time is not None and best is not None:
        return not is_slower(time, best)
    return f"{row.rate:,.0f}" == f"{fastest.rate:,.0f}"


def _largest_batch_lead(row: EstimateRow) -> str:
    label = f" ({row.label}{', the fastest' if row.rate else ''})" if row.label else ""
    surely, probably = row.sizes["surely"], row.sizes["probably"]
    if not surely:
        return f"Probably fits: batch {probably}{label}. No batch surely does."
    upper = f" Up to {probably} probably fits." if probably > surely else ""
    return f"Surely fits: batch {surely}{label}.{upper}"


def _lead(rows: Sequence[EstimateRow], fastest: Sequence[EstimateRow]) -> str:
    """The row to take, its rate, and the rows that are as fast; or why none can be named."""
    unit, judged = rows[0].estimate.unit, [r for r in rows if r.estimate.fits is not None]
    num_fitting = sum(bool(row.estimate.fits) for row in judged)
    best = fastest[0] if fastest else min(rows, key=lambda row: row.estimate.device_total_bytes)
    name, verdict = _row_name(best, rows), estimate_verdict(best.estimate).text
    if judged and not num_fitting:
        return f"None fits: {name} needs least. {verdict}"
    if not fastest:
        fit = f"{num_fitting} of {len(rows)} fit" if judged else "Whether they fit is not known"
        return f"{fit}. For images/s, name a card: --gpu NAME."
    if len(fastest) > 1 and all(map(_waits_for_host, fastest)):
        return (
            f"{len(fastest)} of {len(rows)} are equally fast, as they wait for the host: "
            f"{best.rate:,.0f} {unit}/s (predicted).\nCompare them at a larger --batch-size. "
            f"The first, {name}: {verdict}"
        )
    share = best.scaled.efficiency if best.scaled else None
    devices = best.estimate.setting.world_size
    scaling = f", {share:.0%} of {devices} × one GPU's" if share is not None and devices > 1 else ""
    superlative = "best" if any(row.rate > best.rate for row in fastest) else "fastest"
    superlative += " that fits" if judged else ""
    text = f"The {superlative} is {name}: {best.rate:,.0f} {unit}/s{scaling} (predicted)."
    text += f" {verdict}" if judged else ""
    if len(fastest) > 1:
        others = f" and {len(fastest) - 2} more" if fastest[2:] else ""
        second = fastest[1]
        text += f" Equal within the error: {_row_name(second, rows)} ({second.rate:,.0f}){others}."
    return text


def _waits_for_host(row: EstimateRow) -> bool:
    time = row.estimate.throughput
    return time is not None and time.host_seconds > 0.999 * time.step_seconds


def _row_name(row: EstimateRow, rows: Sequence[EstimateRow]) -> str:
    columns = _key_columns(rows)
    values = [
        f"{text} {name[:-1] if text == '1' else name}" if name in ("gpus", "nodes") else text
        for name, show in columns if (text := str(show(row))) != "none"
    ]  # fmt: skip
    return ", ".join(filter(None, [*values, row.label])) or "the first"


def _common_text(estimates: Sequence[Estimate]) -> str:
    first, differing = estimates[0], differing_fields([e.setting for e in estimates])
    title = f"{first.model.title}, " if len({e.model for e in estimates}) == 1 else ""
    setting = describe_setting(first.setting, first.model, without=differing)
    text = f"All: {title}{setting}{'' if first.gpu else ASSUMED_GPU}."
    rates = [e.throughput for e in estimates if e.throughput is not None]
    if rates:
        low, high = (f"{f(rate.uncertainty for rate in rates):.0%}" for f in (min, max))
        text += f" {first.unit[0].upper()}{first.unit[1:]}/s: predicted, not measured, "
        text += f"±{high}." if low == high else f"±{low} to ±{high}."
    eager = next((narrowing_advice(estimate) for estimate in estimates if estimate.as_eager), "")
    return f"{text} {eager}".rstrip()


def _table(rows: Sequence[EstimateRow], columns: Sequence[Column], **options: Any) -> doc.Table:
    shown = [[show(row) for _, show in columns] for row in rows]
    return doc.Table([name for name, _ in columns], shown, **options)


def _key_columns(rows: Sequence[EstimateRow]) -> list[Column]:
    """The columns that distinguish rows by model, GPU and number of devices."""
    estimates = [row.estimate for row in rows]
    columns: list[Column] = []
    if len({e.model for e in estimates}) > 1:
        columns.append(("model", lambda row: row.estimate.model.title))
    if len({e.gpu for e in estimates}) > 1:
        columns.append(("gpu", lambda row: row.estimate.gpu or ""))
    if any(e.setting.world_size > 1 for e in estimates):
        columns.append(("gpus", lambda row: doc.count_cell(row.estimate.setting.world_size)))
        if len({e.setting.nodes for e in estimates}) > 1:
            columns.append(("nodes", lambda row: doc.count_cell(row.estimate.setting.nodes)))
        columns.append(("parallelism", lambda row: row.estimate.setting.parallelism))
    return columns


def _figure_columns(rows: Sequence[EstimateRow]) -> list[Column]:
    """The figures on a first screen: rates of all devices together, memory of each."""
    estimates, sizes = [row.estimate for row in rows], rows[0].sizes
    columns: list[Column] = [(name, partial(_size_cell, name)) for name in sizes]
    if any(row.rate for row in rows):
        columns.append((f"{estimates[0].unit}/s", _rate_cell))
    if any(row.scaled and row.scaled.efficiency is not None for row in rows):
        columns.append(("efficiency", _efficiency_cell))
    columns.append(("needs", _needs_cell))
    if not _key_columns(rows) and not sizes:
        columns.append(("between", lambda row: range_text(row.estimate)))
    if any(e.fits is not None for e in estimates) and not sizes:
        columns.append(("fits", lambda row: estimate_verdict(row.estimate)))
    return columns + [
        (header, lambda row: timing.hours_cells(row.estimate.cost)[0])
        for header in timing.hours_headers([e.cost for e in estimates])
    ]


def _size_cell(name: str, row: EstimateRow) -> doc.Cell:
    return doc.count_cell(row.sizes[name])


def _rate_cell(row: EstimateRow) -> doc.Cell:
    predicted = row.estimate.throughput
    bound = "up to " if predicted and not predicted.is_whole else ""
    return doc.Number(row.rate, f"{bound}{row.rate:,.0f}" if row.rate else "")


def _needs_cell(row: EstimateRow) -> doc.Cell:
    estimate = row.estimate
    text = NOT_RECORDED if estimate.as_eager else total_text(estimate)
    return doc.Number(estimate.device_total_bytes, text)


def _efficiency_cell(row: EstimateRow) -> doc.Cell:
    share = row.scaled.efficiency if row.scaled else None
    return doc.Number(share, "" if share is None else f"{share:.0%}")


def _memory_columns(rows: Sequence[EstimateRow]) -> list[Column]:
    """The range of the total, the card's memory, and the parts of the total, which are unknown for
    a compiled step that was not recorded."""

    def column(name: str, size: Callable[[Estimate], int]) -> Column:
        def show(row: EstimateRow) -> doc.Cell:
            if row.estimate.as_eager:
                return doc.Number(None, NOT_RECORDED)
            return doc.bytes_cell(size(row.estimate))

        return name, show

    budget: Column = ("has", lambda row: doc.bytes_cell(row.estimate.budget_bytes or 0))
    between: Column = ("between", lambda row: range_text(row.estimate))
    return [
        between,
        *([budget] if any(row.estimate.budget_bytes for row in rows) else []),
        column("saved", lambda e: e.saved_activation_bytes),
        column("allocated", lambda e: e.peak_allocated_bytes),
        column("reserved", lambda e: e.peak_reserved_bytes),
    ]


def _step_part(rows: list[EstimateRow], keys: list[Column], labels: list[Column]) -> list[doc.Part]:
    """The step time of each row; for several devices also what they lose by exchanging data."""
    if not any(row.rate for row in rows):
        return []
    columns: list[Column] = [*keys, ("step", _step_cell)]
    lines = []
    if any(row.scaled for row in rows):
        batch = lambda row: doc.count_cell(row.estimate.setting.global_batch)  # noqa: E731
        columns += [("exposed", _exposed_cell), ("global batch", batch)]
        above = any(r.scaled and (r.scaled.efficiency or 0) >= 1.005 for r in rows)
        reason = " (above 100%: each updates only its share of the weights)" if above else ""
        lines.append(
            f"Efficiency: against as many GPUs that each work by themselves{reason}. "
            "Exposed: the part of a step in which a GPU only waits for the others."
        )
    table = _table(rows, [*columns, *labels])
    return [doc.Folded("step of each", [table, doc.Text("\n".join(lines))])]


def _step_cell(row: EstimateRow) -> doc.Cell:
    predicted = row.estimate.throughput
    return doc.seconds_cell(predicted.step_seconds if predicted else None)


def _exposed_cell(row: EstimateRow) -> doc.Cell:
    """The seconds of a step in which devices only wait for each other."""
    predicted = row.estimate.throughput
    if predicted is None or row.estimate.setting.world_size == 1:
        return doc.Number(None, "")
    exchange = predicted.communication
    return doc.seconds_cell(exchange.exposed_seconds) if exchange else doc.Number(None, "not known")


def range_notes(estimates: Sequence[Estimate]) -> list[str]:
    """The bases of the predicted rates, and the training that the hours are of."""
    bases = dict.fromkeys(e.throughput.basis for e in estimates if e.throughput is not None)
    return [*(f"images/s: {basis}" for basis in bases),
            *timing.hours_notes([e.cost for e in estimates], estimates[0].unit)]  # fmt: skip


def _merge_notes(notes_of_rows: Sequence[Sequence[str]]) -> list[str]:
    """The notes of all rows, each once. The JSON of each row has its own."""
    counts = Counter(note for notes in notes_of_rows for note in dict.fromkeys(notes))
    merged = [f"{'some rows: ' * (n < len(notes_of_rows))}{note}" for note, n in counts.items()]
    if (hidden := len(merged) - MAX_NOTES) > 0:
        text = f"{hidden} more, of some rows: one setting by itself shows its own"
        return [*merged[:MAX_NOTES], text]
    return merged
