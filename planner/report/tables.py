"""Estimates as tables for a terminal: one in full, or one row each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.estimation import Estimate
from planner.report.settings import describe_setting, value_text
from planner.report.time import time_lines
from planner.report.wrapping import wrapped
from planner.schema import Model, NamedModel, SwinConfig, TrainSetting
from planner.throughput.communication import Communication
from planner.units import format_bytes, format_seconds

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
# Fields of a setting that a row shows when not all estimates agree on them, or always.
ALWAYS_SHOWN = ("batch_size", "precision", "checkpointing")
_TEXT_FIELDS = [n for n, f in TrainSetting.model_fields.items() if f.annotation is not int]


def breakdown_table(estimate: Estimate) -> str:
    """One estimate in full: what is alive at the peak and where that is, the totals and what
    separates them, the verdict, the predicted speed, and what it rests on."""
    parts = [
        _heading(estimate),
        f"At the peak, in {estimate.peak_at}\n" + _breakdown(estimate),
        _largest(estimate),
        _totals(estimate),
        verdict(estimate) + _way_out(estimate),
        _speed(estimate),
        _notes("Assumed", estimate.assumed),
        _notes("Left out", estimate.left_out),
    ]
    return "\n\n".join(part for part in parts if part)


def estimate_table(estimates: Sequence[Estimate]) -> str:
    """One row for each estimate: the settings in which they differ, the totals, the verdict and,
    where predicted, images (or clips, or samples) a second."""
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
        *([f"{unit(estimates[0].model)}/s{each}"] if timed else []),
        "peak at",
    ]
    rows = [
        [
            *([e.model.title] if models else []),
            *(value_text(getattr(e.setting, field)) for field in fields),
            format_bytes(e.saved_activation_bytes),
            format_bytes(e.peak_allocated_bytes),
            format_bytes(e.peak_reserved_bytes),
            format_bytes(e.device_total_bytes),
            *([fits_word(e)] if judged else []),
            *([_images(e)] if timed else []),
            e.peak_at.split()[0],
        ]
        for e in estimates
    ]
    text = {"model", "fits", "peak at", *map(header, _TEXT_FIELDS)}
    return tabulated(
        rows,
        headers=headers,
        colalign=["left" if header in text else "right" for header in headers],
    )


def verdict(estimate: Estimate) -> str:
    """Whether it fits, by how much, and whether that is more than the figure is known to; in two
    lines."""
    low, high = format_bytes(estimate.low_bytes), format_bytes(estimate.high_bytes)
    between = f"The device total is expected between {low} and {high}."
    budget = estimate.budget_bytes
    if estimate.fits is None or budget is None:
        return f"{between}\nTo check the fit, pass --gpu NAME or --memory SIZE."
    spare = budget - estimate.device_total_bytes
    if estimate.fits and estimate.fits_surely:
        answer = f"Fits in {format_bytes(budget)} with {format_bytes(spare)} to spare."
    elif estimate.fits:
        more = format_bytes(estimate.high_bytes - estimate.device_total_bytes)
        answer = (
            f"Likely fits in {format_bytes(budget)}, by {format_bytes(spare)}: less than the "
            f"{more} that it may need beyond this figure."
        )
    elif spare < 0 and estimate.low_bytes <= budget:
        less = format_bytes(estimate.device_total_bytes - estimate.low_bytes)
        answer = (
            f"Unlikely to fit in {format_bytes(budget)}: it needs {format_bytes(-spare)} more, "
            f"less than the {less} by which this figure may be too high."
        )
    elif spare < 0:
        answer = f"Does not fit in {format_bytes(budget)}: it needs {format_bytes(-spare)} more."
    else:
        answer = (
            f"Does not fit in {format_bytes(budget)}: only {format_bytes(spare)} would be left."
        )
    return f"{answer}\n{between}"


def _way_out(estimate: Estimate) -> str:
    if estimate.fits is not False:
        return ""
    return "\nWays to make it fit: 'planner advise' with the same model, batch and device."


def _heading(estimate: Estimate) -> str:
    return (
        f"{estimate.model.title}: {estimate.num_parameters:,} parameters\n"
        f"{describe_setting(estimate.setting)}"
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
    unknown = [key for key in estimate.breakdown if key not in BREAKDOWN_ROWS]
    rows += [
        [key, format_bytes(estimate.breakdown[key]), _share(estimate.breakdown[key], total)]
        for key in unknown
    ]
    rows.append(["device total", format_bytes(total), _share(total, total)])
    return _aligned(rows)


def _largest(estimate: Estimate) -> str:
    """The largest things alive at the peak that come and go with the step."""
    rows = [
        [path or "-", label.removeprefix("aten."), format_bytes(num_bytes)]
        for path, label, num_bytes in estimate.largest_at_peak
    ]
    if not rows:
        return ""
    return "Largest then\n" + tabulated(rows, colalign=["left", "left", "right"])


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
        held = "of the host's memory, for what backward needs"
        rows.append(["pinned", format_bytes(estimate.pinned_host_bytes), "", held])
    return _aligned(rows, num_right=2)


def _speed(estimate: Estimate) -> str:
    predicted = estimate.throughput
    if predicted is None:
        return ""
    each = ""
    if predicted.devices > 1:
        each = (
            f" on each of {predicted.devices} GPUs, {predicted.all_images_per_second:,.0f} in all"
        )
    lines = [
        f"Predicted, not measured: {predicted.images_per_second:,.0f} {unit(estimate.model)}/s"
        f"{each}, {format_seconds(predicted.step_seconds)} a step, ±{predicted.uncertainty:.0%} "
        f"({predicted.basis}).",
        *(time_lines("the step", predicted) if predicted.parts else []),
        *_communication(predicted.communication),
    ]
    return "\n".join(wrapped(line) for line in lines)


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


def _aligned(rows: list[list[str]], num_right: int = 2) -> str:
    """Rows without a header: the first column to the left, the next `num_right` to the right."""
    align = ["left", *["right"] * num_right, *["left"] * (len(rows[0]) - 1 - num_right)]
    return tabulated(rows, colalign=align)


def tabulated(rows: list[list[str]], colalign: list[str], headers: Sequence[str] = ()) -> str:
    # Imported here, since `planner estimate --json` has no use for it and is timed.
    from tabulate import tabulate

    tablefmt = "simple" if headers else "plain"
    return tabulate(rows, headers, tablefmt, disable_numparse=True, colalign=colalign)


def shown_fields(settings: Sequence[TrainSetting]) -> list[str]:
    return [
        field
        for field in TrainSetting.model_fields
        if field in ALWAYS_SHOWN or len({getattr(s, field) for s in settings}) > 1
    ]


def header(field: str) -> str:
    return "check-\npointing" if field == "checkpointing" else field.replace("_", "\n")


def fits_word(estimate: Estimate) -> str:
    """Yes or no, or likely or unlikely where the uncertainty reaches over the budget."""
    if estimate.fits is None or estimate.budget_bytes is None:
        return ""
    if estimate.fits:
        return "yes" if estimate.fits_surely else "likely"
    return "unlikely" if estimate.low_bytes <= estimate.budget_bytes else "no"


def unit(model: Model) -> str:
    """What a batch of the model counts."""
    if isinstance(model, SwinConfig):
        return "images"
    task = model.task if isinstance(model, NamedModel) else ""
    return {"classification": "images", "video": "clips"}.get(task, "samples")


def _images(estimate: Estimate) -> str:
    return f"{estimate.throughput.images_per_second:,.0f}" if estimate.throughput else ""


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""
