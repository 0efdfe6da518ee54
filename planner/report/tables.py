"""Estimates as tables for a terminal: one in full, or one row each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.core.schema import TrainSetting
from planner.core.units import format_bytes, format_range, format_seconds
from planner.estimation.estimate import Estimate
from planner.report.cost import (
    LEFT_OUT,
    cost_cells,
    cost_headers,
    cost_notes,
    cost_text,
    training_text,
)
from planner.report.settings import describe_setting, in_words, value_text
from planner.report.terminal import table_text, wrapped
from planner.report.time import time_lines
from planner.report.verdicts import fits_cell, verdict_text
from planner.throughput.communication import Communication

# The order people add up in: tensors first, then what PyTorch and the driver put around them.
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
NOT_TRACED = "not traced"
MAX_NOTES = 10  # below a table, of what its rows assume
# Fields of a setting that a row shows when not all estimates agree on them, or always.
ALWAYS_SHOWN = ("batch_size", "precision", "checkpointing")
_TEXT_FIELDS = [n for n, f in TrainSetting.model_fields.items() if f.annotation is not int]


def breakdown_table(estimate: Estimate) -> str:
    """One estimate in full: the verdict, the predicted rate and what to do next; then what is alive
    at the peak and where that is, the totals and what separates them, and what it rests on."""
    parts = [
        "\n".join(filter(None, [verdict(estimate), _rate(estimate), _next(estimate)])),
        _heading(estimate),
        f"Memory at the peak, which is in {estimate.peak_at}\n" + _breakdown(estimate),
        _largest(estimate),
        _totals(estimate),
        _speed(estimate),
        _notes("Assumed", estimate.assumed),
        _notes("Left out", estimate.left_out),
    ]
    return "\n\n".join(part for part in parts if part)


def estimate_table(estimates: Sequence[Estimate]) -> str:
    """One row for each estimate: the settings in which they differ, the totals, the verdict and,
    where predicted, images (or clips, or samples) a second; then how sure that is, and what it
    rests on."""
    fields = shown_fields([e.setting for e in estimates])
    models = len({e.model for e in estimates}) > 1
    judged = any(e.fits is not None for e in estimates)
    timed = any(e.throughput is not None for e in estimates)
    each = "\nper gpu" if any(e.setting.world_size > 1 for e in estimates) else ""
    headers = [
        *(["model"] if models else []),
        *(header(field) for field in fields),
        "saved for\nbackward",
        "peak\nallocated",
        "peak\nreserved",
        "device\ntotal",
        *(["fits"] if judged else []),
        *([f"predicted\n{estimates[0].unit}/s{each}"] if timed else []),
        *cost_headers([e.cost for e in estimates]),
        "peak at",
    ]
    rows = [
        [
            *([e.model.title] if models else []),
            *(value_text(getattr(e.setting, field)) for field in fields),
            *_peaks(e),
            total_text(e),
            *([fits_cell(e)] if judged else []),
            *([_images(e)] if timed else []),
            *cost_cells(e.cost),
            e.peak_at.split()[0],
        ]
        for e in estimates
    ]
    text = {"model", "fits", "peak at", *map(header, _TEXT_FIELDS)}
    table = table_text(rows, headers, "".join("l" if name in text else "r" for name in headers))
    notes = [wrapped(note) for note in range_notes(estimates)]
    return "\n".join([table, "", *notes, _notes("Assumed", _assumed(estimates))])


def _peaks(estimate: Estimate) -> list[str]:
    """What is saved, allocated and reserved: not of a compiled step that was not traced."""
    if estimate.as_eager:
        return [NOT_TRACED] * 3
    return [
        format_bytes(estimate.saved_activation_bytes),
        format_bytes(estimate.peak_allocated_bytes),
        format_bytes(estimate.peak_reserved_bytes),
    ]


def total_text(estimate: Estimate) -> str:
    """The device total; of a compiled step that was not traced between what it is expected."""
    if estimate.as_eager:
        return format_range(estimate.low_bytes, estimate.high_bytes)
    return format_bytes(estimate.device_total_bytes)


def range_notes(estimates: Sequence[Estimate]) -> list[str]:
    """How far the figures of a table may be off: its rates, and its device totals."""
    found = []
    rates = [e.throughput for e in estimates if e.throughput is not None]
    if rates:
        least, most = (f"±{f(rate.uncertainty for rate in rates):.0%}" for f in (min, max))
        off = most if least == most else f"{least} to {most}"
        basis = {rate.basis for rate in rates}
        on = f" ({basis.pop()})" if len(basis) == 1 else ""
        found.append(f"{estimates[0].unit}/s: predicted, not measured, within {off}{on}.")
    found += cost_notes([e.cost for e in estimates], estimates[0].unit)
    known = [
        (e.low_bytes / e.device_total_bytes, e.high_bytes / e.device_total_bytes)
        for e in estimates
        if not e.as_eager
    ]
    if known:
        low, high = min(low for low, _ in known), max(high for _, high in known)
        differ = len({(f"{low:.0%}", f"{high:.0%}") for low, high in known}) > 1
        found.append(
            f"Memory: the device total is expected between {low:.0%} and {high:.0%} of the figure"
            f"{' in the least certain row' if differ else ''}."
        )
    return [f"{note[0].upper()}{note[1:]}" for note in found]


def _assumed(estimates: Sequence[Estimate]) -> list[str]:
    """What the rows rest on, each once; what only some do with those that do."""
    rows: dict[str, list[Estimate]] = {}
    for estimate in estimates:
        for line in estimate.assumed:
            rows.setdefault(line, []).append(estimate)
    lines = [f"{_of_rows(those, estimates)}{line}" for line, those in rows.items()]
    more = len(lines) - MAX_NOTES
    said = f"{more} more, of some rows: one setting by itself shows all of its own"
    return [*lines[:MAX_NOTES], *([said] if more > 0 else [])]


def _of_rows(those: Sequence[Estimate], estimates: Sequence[Estimate]) -> str:
    """`compile default, max-autotune: `, if that is what tells those rows from the others."""
    if len(those) == len(estimates):
        return ""
    for field in shown_fields([e.setting for e in estimates]):
        values = dict.fromkeys(getattr(e.setting, field) for e in those)
        if len(those) == sum(getattr(e.setting, field) in values for e in estimates):
            return f"{in_words({field: ', '.join(map(value_text, values))})}: "
    return "some rows: "


def verdict(estimate: Estimate) -> str:
    """Whether it fits, by how much, and how far the figure may be off; in two lines."""
    low, high = format_bytes(estimate.low_bytes), format_bytes(estimate.high_bytes)
    between = f"The device total is expected between {low} and {high}."
    if estimate.fits is None:
        return f"{between}\nTo check the fit, pass --gpu NAME or --memory SIZE."
    return f"{verdict_text(estimate)}\n{between}"


def _next(estimate: Estimate) -> str:
    if estimate.fits is None:
        return ""  # the verdict says what to pass
    advise = "'planner advise' with the same model, batch and device"
    if estimate.fits:
        return wrapped(f"Next: {advise} looks for faster ways; 'planner tune' measures them.")
    return wrapped(f"Next: {advise} finds ways to make it fit.")


def _heading(estimate: Estimate) -> str:
    return (
        f"{estimate.model.title}: {estimate.num_parameters:,} parameters\n"
        f"{describe_setting(estimate.setting, estimate.model)}"
    )


def _breakdown(estimate: Estimate) -> str:
    total = estimate.device_total_bytes
    titles = dict(BREAKDOWN_ROWS)
    if estimate.setting.parallelism == "ddp":
        in_buckets = estimate.setting.ddp_bucket_view
        titles["gradients"] += " in DDP buckets" if in_buckets else ", DDP buckets"
    rows = [
        [title, format_bytes(estimate.breakdown[key]), _share(estimate.breakdown[key], total)]
        for key, title in titles.items()
        if estimate.breakdown.get(key)
    ]
    rows.append(["device total", format_bytes(total), _share(total, total)])
    return table_text(rows, align="lr")


def _largest(estimate: Estimate) -> str:
    """The largest things alive at the peak that come and go with the step."""
    rows = [
        [path or "-", label.removeprefix("aten."), format_bytes(num_bytes)]
        for path, label, num_bytes in estimate.largest_at_peak
    ]
    if not rows:
        return ""
    return "Largest tensors at the peak\n" + table_text(rows, align="llr")


def _totals(estimate: Estimate) -> str:
    """The four totals, each with what it adds to the one before."""
    outside = "CUDA context" + (", NCCL" if "communication" in estimate.breakdown else "")
    stages = [
        ("peak live", estimate.peak_live_bytes, "tensors alive at once"),
        (
            "peak allocated",
            estimate.peak_allocated_bytes,
            "workspaces, block rounding (max_memory_allocated)",
        ),
        (
            "peak reserved",
            estimate.peak_reserved_bytes,
            "free memory that is kept (max_memory_reserved)",
        ),
        ("device total", estimate.device_total_bytes, f"{outside} (nvidia-smi)"),
    ]
    rows = []
    before = 0
    for name, num_bytes, adds in stages:
        more = f"+ {format_bytes(num_bytes - before)}" if before else ""
        rows.append([name, format_bytes(num_bytes), more, adds])
        before = num_bytes
    saved = "held from forward to backward, of one micro-batch"
    rows.append(["saved for backward", format_bytes(estimate.saved_activation_bytes), "", saved])
    if estimate.pinned_host_bytes:
        optimizer = estimate.setting.offload_optimizer != "none"
        held = "of the host's memory, for what " + ("the optimizer" if optimizer else "backward")
        held += " needs"
        rows.append(["pinned", format_bytes(estimate.pinned_host_bytes), "", held])
    return table_text(rows, align="lrrl")


def _rate(estimate: Estimate) -> str:
    predicted = estimate.throughput
    if predicted is None:
        return ""
    each = ""
    if predicted.devices > 1:
        each = (
            f" on each of {predicted.devices} GPUs, {predicted.all_images_per_second:,.0f} in all"
        )
    return wrapped(
        f"Predicted, not measured: {'' if predicted.is_whole else 'up to '}"
        f"{predicted.images_per_second:,.0f} {estimate.unit}/s"
        f"{each}, {format_seconds(predicted.step_seconds)} a step, ±{predicted.uncertainty:.0%} "
        f"({predicted.basis})."
    )


def _speed(estimate: Estimate) -> str:
    """Where the predicted time goes, what devices exchange, and what a whole training costs."""
    predicted = estimate.throughput
    if predicted is None:
        return ""
    lines = [
        *(time_lines("the step", predicted) if predicted.parts else []),
        *_communication(predicted.communication),
        *_cost(estimate),
    ]
    return "\n".join(wrapped(line) for line in lines)


def _cost(estimate: Estimate) -> list[str]:
    cost = estimate.cost
    if cost is None:
        return []
    return [f"{training_text(cost)} {estimate.unit}: {cost_text(cost)}; {LEFT_OUT}."]


def _communication(found: Communication | None) -> list[str]:
    """What devices exchange in a step, and how much of it nothing hides."""
    if found is None:
        return []
    return [
        f"Each GPU sends {format_bytes(found.sent_bytes)} a step over {found.link}, which takes "
        f"{format_seconds(found.seconds)}, of which {format_seconds(found.exposed_seconds)} are "
        f"exposed. The step would take {format_seconds(found.alone_seconds)} without, "
        f"{format_seconds(found.low_seconds)} over a link as fast as this may be, and "
        f"{format_seconds(found.high_seconds)} over one as slow."
    ]


def _notes(title: str, notes: Iterable[str]) -> str:
    lines = [wrapped(f"- {note}", indent="  ") for note in notes]
    return "\n".join([f"{title}:", *lines]) if lines else ""


def shown_fields(settings: Sequence[TrainSetting]) -> list[str]:
    return [
        field
        for field in TrainSetting.model_fields
        if field in ALWAYS_SHOWN or len({getattr(s, field) for s in settings}) > 1
    ]


def header(field: str) -> str:
    return "check-\npointing" if field == "checkpointing" else field.replace("_", "\n")


def _images(estimate: Estimate) -> str:
    return f"{estimate.throughput.images_per_second:,.0f}" if estimate.throughput else ""


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}"
