"""Estimates as answers: one in full, or a row for each of several."""

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
from planner.report import time as timing
from planner.report.page import contents as doc
from planner.report.text import describe_setting, in_words
from planner.throughput.result import Throughput, is_slower

NOT_RECORDED = "not recorded"
LIKE = "; an A100's kernels are assumed"  # what `overheads_for` takes where no GPU is named
NARROWER = "Compile is not recorded: --record narrows the range, in one to three minutes."
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
NUM_NAMED = 5  # of those, on a first screen
MAX_NOTES = 10  # of what several rows assume
Column = tuple[str, Callable[["Row"], doc.Cell]]
Next = Callable[[Estimate], str]  # the command that goes on from an estimate, "" for none


def verdict_of(estimate: Estimate) -> doc.Verdict:
    """The word, and what it rests on: `Needs 5.00 GiB (4.73–5.27 GiB) of 23.52 GiB.`"""
    return doc.Verdict(_kind(estimate), _why(estimate))


def verdict_text(estimate: Estimate, when: str = "") -> str:
    """The same as one sentence: `Fits: needs 5.00 GiB (4.73–5.27 GiB) of 23.52 GiB.`"""
    found = verdict_of(estimate)
    return f"{found.word}{when}: {found.text[0].lower()}{found.text[1:]}"


def is_shown_as_running(estimate: Estimate) -> bool:
    """Whether a rate may stand for it: what does not fit does not run."""
    return estimate.fits is not False


def total_text(estimate: Estimate) -> str:
    """The device total; of a compiled step that was not recorded between what it is expected."""
    if estimate.as_eager:
        return between_text(estimate)
    return format_bytes(estimate.device_total_bytes)


def between_text(estimate: Estimate) -> str:
    return format_range(estimate.low_bytes, estimate.high_bytes)


def needs_text(estimate: Estimate) -> str:
    """`5.00 GiB (4.73–5.27 GiB)`"""
    total, between = total_text(estimate), between_text(estimate)
    return total if total == between else f"{total} ({between})"


def _kind(estimate: Estimate) -> doc.VerdictKind:
    if estimate.fits is None or estimate.budget_bytes is None:
        return "unknown"
    if estimate.fits:
        return "fits" if estimate.fits_surely else "likely"
    return "unlikely" if estimate.low_bytes <= estimate.budget_bytes else "no"


def _why(estimate: Estimate) -> str:
    text, budget = f"Needs {needs_text(estimate)}", estimate.budget_bytes
    text += "" if budget is None else f" of {format_bytes(budget)}"
    text += "" if estimate.gpu else LIKE
    if budget is None:
        text += ". No memory was named: pass --gpu NAME or --memory SIZE"
    elif estimate.num_alloc_retries:
        text += ", only by freeing cached memory, which is slower"
    return f"{text}."


def narrower(estimate: Estimate) -> str:
    """What narrows the range of a compiled step whose ledger is that of the eager one."""
    if has_known_graphs(estimate.setting):
        return NARROWER
    return "Only 'planner tune' narrows the range: this compiled step cannot be recorded."


def peak_text(estimate: Estimate) -> str:
    """Where its peak is: `backward of layers.3.blocks.1.mlp.fc1, in torch's mm kernel`."""
    return re.sub(r" \((\w+)\)", r", in torch's \1 kernel", estimate.peak_at)


def estimate_answer(estimate: Estimate, then: Next, said: Sequence[str] = ()) -> list[doc.Part]:
    """The verdict, the rate, what it is of, where the bytes and the seconds go, and what to type
    next; folded, all the rest. `said` is what else is to be known first."""
    total = estimate.device_total_bytes
    sizes = sorted(estimate.breakdown.items(), key=lambda item: -item[1])
    rest = sum(num_bytes for _, num_bytes in sizes[NUM_NAMED:])
    inputs = {"aten.randn": f"input {estimate.unit}"}
    largest = [
        (path or inputs.get(label, "in no module"), label.removeprefix("aten."), doc.bytes_cell(n))
        for path, label, n in estimate.largest_at_peak
    ]
    what = f"{estimate.model.title}, {estimate.num_parameters:,} parameters: "
    what += describe_setting(estimate.setting, estimate.model)
    time = estimate.throughput
    limits = [] if time is None else [f"{timing.bound_text('the step', time.bound_seconds)}."]
    place, _, _ = estimate.peak_at.partition(" (")  # without torch's name of the operation
    unrecorded = [narrower(estimate)] if estimate.as_eager else []
    compiled = "of the step without compile " if estimate.as_eager else ""
    return [
        verdict_of(estimate),
        doc.Text("\n".join([*_rate(estimate), what, *_cost(estimate), *unrecorded, *said])),
        doc.Table(
            ("", "", ""),
            [
                *(_share(_title(key, estimate.setting), n, total) for key, n in sizes[:NUM_NAMED]),
                *([_share("everything else", rest, total)] if rest else []),
            ],
            f"Where the {format_bytes(total)} {compiled}go (peak: {place})",
        ),
        doc.Text("\n".join([_in_script(estimate), *limits])),
        *([doc.Copyable(then(estimate), "Next")] if then(estimate) else []),
        doc.Folded("memory at the peak in full", [
            doc.Text(f"The peak is in {peak_text(estimate)}."),
            doc.Table(
                ("", "", ""),
                [_share(title, estimate.breakdown[key], total)
                 for key in BREAKDOWN_ROWS if estimate.breakdown.get(key)
                 for title in [_title(key, estimate.setting)]],
            ),
            totals_table(estimate),
        ]),
        *([doc.Folded("largest tensors", [doc.Table(("", "", ""), largest)])] if largest else []),
        *_time(estimate),
        *notes("assumed", estimate.assumed),
        *notes("left out", estimate.left_out),
    ]  # fmt: skip


def notes(title: str, lines: Iterable[str]) -> list[doc.Part]:
    """What an answer rests on, where it rests on anything."""
    text = "\n".join(f"- {line}" for line in lines)
    return [doc.Folded(title, [doc.Text(text)])] if text else []


def rate_text(predicted: Throughput, unit: str) -> str:
    """`1,132 images/s, likely 736–1,528`; `8,151 images/s on 8 GPUs (1,019 each), likely …`"""
    rate, off, gpus = predicted.all_images_per_second, predicted.uncertainty, predicted.devices
    on = f" on {gpus} GPUs ({rate / gpus:,.0f} each)" if gpus > 1 else ""
    return (
        f"{'' if predicted.is_whole else 'up to '}{rate:,.0f} {unit}/s{on}, "
        f"likely {rate * (1 - off):,.0f}–{rate * (1 + off):,.0f}"
    )


def _rate(estimate: Estimate) -> list[str]:
    predicted = estimate.throughput
    if predicted is None:
        return []
    text = "" if is_shown_as_running(estimate) else "With enough memory: "
    text += rate_text(predicted, estimate.unit)
    return [f"{text}; {format_seconds(predicted.step_seconds)} a step. Predicted, not measured."]


def _cost(estimate: Estimate) -> list[str]:
    if estimate.cost is None:
        return []
    what, hours = timing.training_text(estimate.cost), timing.hours_text(estimate.cost)
    return [f"{what} {estimate.unit}: {hours}; {timing.LEFT_OUT}."]


def _title(key: str, setting: TrainSetting) -> str:
    if key == "gradients" and setting.parallelism == "ddp":
        return "gradients, DDP buckets"
    return BREAKDOWN_ROWS[key]


def _share(title: str, part: int, whole: int) -> tuple[doc.Cell, ...]:
    return title, doc.bytes_cell(part), doc.share_cell(part, whole)


def _in_script(estimate: Estimate) -> str:
    if estimate.as_eager:
        return "In your script: not known of a compiled step that is not recorded."
    sizes = {"allocated": estimate.peak_allocated_bytes, "reserved": estimate.peak_reserved_bytes}
    said = (f"max_memory_{name} {format_bytes(size)}" for name, size in sizes.items())
    return f"In your script: {', '.join(said)}."


def totals_table(estimate: Estimate) -> doc.Table:
    """The four totals, each with what it adds to the one before, and how sure the last is."""
    outside = "CUDA context" + (", NCCL" if "communication" in estimate.breakdown else "")
    stages = [
        ("peak live", estimate.peak_live_bytes, "tensors alive at once"),
        ("peak allocated", estimate.peak_allocated_bytes, "workspaces, block rounding"),
        ("peak reserved", estimate.peak_reserved_bytes, "free memory that is kept"),
        ("device total", estimate.device_total_bytes, f"{outside} (as nvidia-smi)"),
    ]
    rows: list[Sequence[doc.Cell]] = []
    before = 0
    for name, num_bytes, adds in stages:
        more = f"+ {format_bytes(num_bytes - before)}" if before else ""
        rows.append((name, doc.bytes_cell(num_bytes), doc.Number(num_bytes - before, more), adds))
        before = num_bytes
    saved = "from forward to backward, of one micro-batch"
    none = doc.Number(None, "")
    rows.append(("saved", doc.bytes_cell(estimate.saved_activation_bytes), none, saved))
    if estimate.pinned_host_bytes:
        needs = "the optimizer" if estimate.setting.offload_optimizer != "none" else "backward"
        held = f"of the host's memory, for what {needs} needs"
        rows.append(("pinned", doc.bytes_cell(estimate.pinned_host_bytes), none, held))
    return doc.Table(("total", "size", "more", "which adds"), rows)


def _time(estimate: Estimate) -> list[doc.Part]:
    predicted = estimate.throughput
    if predicted is None:
        return []
    basis = doc.Text(f"±{predicted.uncertainty:.0%}: {predicted.basis}.")
    facts = doc.Facts(timing.time_facts(predicted, estimate.unit, is_shown_as_running(estimate)))
    return [doc.Folded("time", [basis, facts, *timing.time_parts(predicted)])]


_SPREAD = ("world_size", "nodes", "parallelism")  # have columns of their own


@dataclass(frozen=True)
class Row:
    """One of several estimates: `apart` are the fields that tell it from the others, `scaled` is
    what it is beside one device, `sizes` are the largest batches of its kind."""

    estimate: Estimate
    apart: dict[str, object] = field(default_factory=dict)
    scaled: Scaled | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def own(self) -> str:
        """What it is, among the others."""
        elsewhere = (*_SPREAD, *(["batch_size"] if self.sizes else []))
        return in_words({f: v for f, v in self.apart.items() if f not in elsewhere})

    @property
    def rate(self) -> float:
        """That of all its devices; 0 where none is predicted."""
        predicted = self.estimate.throughput
        return predicted.all_images_per_second if predicted else 0.0


def rows_answer(
    found: Sequence[Estimate], then: Next, said: Sequence[str] = (),
    scaled: Sequence[Scaled] = (), sizes: Sequence[Mapping[str, int]] = (),
) -> list[doc.Part]:  # fmt: skip
    """Which of several to take, what all have in common, a row for each, and what to type next;
    folded, their other figures and what they rest on."""
    rows = _rows(found, scaled or repeat(None), sizes or repeat({}))
    alike = _alike(rows)
    keys = _keys(rows)
    own: list[Column] = [("setting", lambda row: row.own)] if any(row.own for row in rows) else []
    first = [*keys, *_figures(rows), *own]
    marked = [rows.index(best) for best in alike[:1]]
    best_of = (alike or sorted(rows, key=lambda row: row.estimate.device_total_bytes))[0].estimate
    lead = _lead_of_largest(alike[0]) if sizes else _lead(rows, alike)
    return [
        doc.Text("\n".join([lead, _common(found), *said])),
        _table(rows, first, caption="The largest batches:" if sizes else "", marked=marked),
        *([doc.Copyable(then(best_of), "Next")] if then(best_of) else []),
        doc.Folded("memory of each", [_table(rows, [*keys, *_memory(rows), *own])]),
        *_steps(rows, keys, own),
        *notes("how sure the figures are", range_notes(found)),
        *notes("assumed", _of_rows([e.assumed for e in found])),
        *notes("left out", _of_rows([e.left_out for e in found])),
    ]


def _rows(found: Sequence[Estimate], *beside: Iterable[Any]) -> list[Row]:
    names = apart_fields([e.setting for e in found])
    aparts = [{name: getattr(e.setting, name) for name in names} for e in found]
    return list(map(Row, found, aparts, *beside))


def row_names(found: Sequence[Estimate]) -> list[str]:
    """Each by what tells it apart: `rtx-4090, batch 32`; numbered where nothing does."""
    rows = _rows(found)
    names = [_name(row, rows) if len(rows) > 1 else row.estimate.model.title for row in rows]
    return [
        name if names.count(name) == 1 else f"{name} #{number}"
        for number, name in enumerate(names, start=1)
    ]


def apart_fields(settings: Sequence[TrainSetting]) -> list[str]:
    """The fields in which not all agree."""
    return [f for f in TrainSetting.model_fields if len({getattr(s, f) for s in settings}) > 1]


def _alike(rows: Sequence[Row]) -> list[Row]:
    """The fastest that fits, and what is as fast within the error: first what surely fits, then
    what shards nothing, then the fastest. None where none fits, or no rate is known; of the largest
    batches all are alike then, and the largest is first."""
    fitting = [r for r in rows if r.estimate.fits is not False and (r.rate or r.sizes)]
    fastest = max(fitting, key=lambda row: row.rate, default=None)

    def rank(row: Row) -> tuple[bool, bool, float, int]:
        setting, unsure = row.estimate.setting, row.estimate.fits_surely is False
        return unsure, setting.parallelism not in ("none", "ddp"), -row.rate, -setting.batch_size

    return sorted((row for row in fitting if fastest and _is_as_fast(row, fastest)), key=rank)


def _is_as_fast(row: Row, fastest: Row) -> bool:
    """Whether the error cannot tell them apart; on other cards, whether both figures are equal."""
    kind, other = ((e.gpu, e.model, e.setting.world_size) for e in (row.estimate, fastest.estimate))
    time, best = row.estimate.throughput, fastest.estimate.throughput
    if kind == other and time is not None and best is not None:
        return not is_slower(time, best)
    return f"{row.rate:,.0f}" == f"{fastest.rate:,.0f}"


def _lead_of_largest(row: Row) -> str:
    own = f" ({row.own}{', the fastest' if row.rate else ''})" if row.own else ""
    sure, most = row.sizes["surely"], row.sizes["probably"]
    if not sure:
        return f"Probably fits: batch {most}{own}. No batch surely does."
    return f"Surely fits: batch {sure}{own}." + f" Up to {most} probably fits." * (most > sure)


def _lead(rows: Sequence[Row], alike: Sequence[Row]) -> str:
    unit, judged = rows[0].estimate.unit, [r for r in rows if r.estimate.fits is not None]
    fitting = [row for row in judged if row.estimate.fits]
    if judged and not fitting:
        least = min(rows, key=lambda row: row.estimate.device_total_bytes)
        return f"None fits: {_name(least, rows)} needs least. {verdict_of(least.estimate).text}"
    if not alike:
        fit = f"{len(fitting)} of {len(rows)} fit" if judged else "Whether they fit is not known"
        return f"{fit}. For images/s, name a card: --gpu NAME."
    best, *alike = alike
    share = best.scaled.efficiency if best.scaled else None
    devices = best.estimate.setting.world_size
    of_one = f", {share:.0%} of {devices} × one GPU's" if share is not None and devices > 1 else ""
    what = "best" if any(row.rate > best.rate for row in alike) else "fastest"
    what += " that fits" if judged else ""
    text = f"The {what} is {_name(best, rows)}: {best.rate:,.0f} {unit}/s{of_one} (predicted)."
    text += f" {verdict_of(best.estimate).text}" if judged else ""
    if alike:
        more = f" and {len(alike) - 1} more" if alike[1:] else ""
        text += f" Equal within the error: {_name(alike[0], rows)} ({alike[0].rate:,.0f}){more}."
    if alike and all(map(_waits_for_host, (best, *alike))):
        return (
            f"{len(alike) + 1} of {len(rows)} are equally fast, as they wait for the host: "
            f"{best.rate:,.0f} {unit}/s (predicted).\nCompare them at a larger --batch-size. "
            f"The first, {_name(best, rows)}: {verdict_of(best.estimate).text}"
        )
    return text


def _waits_for_host(row: Row) -> bool:
    time = row.estimate.throughput
    return time is not None and time.host_seconds > 0.999 * time.step_seconds


def _name(row: Row, rows: Sequence[Row]) -> str:
    columns = _keys(rows)
    named = [
        f"{text} {name[:-1] if text == '1' else name}" if name in ("gpus", "nodes") else text
        for name, show in columns if (text := str(show(row))) != "none"
    ]  # fmt: skip
    return ", ".join(filter(None, [*named, row.own])) or "the first"


def _common(found: Sequence[Estimate]) -> str:
    first, apart = found[0], apart_fields([e.setting for e in found])
    title = f"{first.model.title}, " if len({e.model for e in found}) == 1 else ""
    like = "" if first.gpu else LIKE
    text = f"All: {title}{describe_setting(first.setting, first.model, without=apart)}{like}."
    rates = [e.throughput for e in found if e.throughput is not None]
    if rates:
        least, most = (f"{f(rate.uncertainty for rate in rates):.0%}" for f in (min, max))
        text += f" {first.unit[0].upper()}{first.unit[1:]}/s: predicted, not measured, "
        text += f"±{most}." if least == most else f"±{least} to ±{most}."
    eager = next((narrower(one) for one in found if one.as_eager), "")
    return f"{text} {eager}".rstrip()


def _table(rows: Sequence[Row], columns: Sequence[Column], **said: Any) -> doc.Table:
    shown = [[show(row) for _, show in columns] for row in rows]
    return doc.Table([name for name, _ in columns], shown, **said)


def _keys(rows: Sequence[Row]) -> list[Column]:
    """What a row is of, but for the rest of its setting."""
    estimates = [row.estimate for row in rows]
    found: list[Column] = []
    if len({e.model for e in estimates}) > 1:
        found.append(("model", lambda row: row.estimate.model.title))
    if len({e.gpu for e in estimates}) > 1:
        found.append(("gpu", lambda row: row.estimate.gpu or ""))
    if any(e.setting.world_size > 1 for e in estimates):
        found.append(("gpus", lambda row: doc.count_cell(row.estimate.setting.world_size)))
        if len({e.setting.nodes for e in estimates}) > 1:
            found.append(("nodes", lambda row: doc.count_cell(row.estimate.setting.nodes)))
        found.append(("parallelism", lambda row: row.estimate.setting.parallelism))
    return found


def _figures(rows: Sequence[Row]) -> list[Column]:
    """Those of a first screen: rates are of all devices, memory of each."""
    estimates, sizes = [row.estimate for row in rows], rows[0].sizes
    found: list[Column] = [(name, partial(_size, name)) for name in sizes]
    if any(row.rate for row in rows):
        found.append((f"{estimates[0].unit}/s", _rate_cell))
    if any(row.scaled and row.scaled.efficiency is not None for row in rows):
        found.append(("efficiency", _efficiency))
    found.append(("needs", _needs))
    if not _keys(rows) and not sizes:
        found.append(("between", lambda row: between_text(row.estimate)))
    if any(e.fits is not None for e in estimates) and not sizes:
        found.append(("fits", lambda row: verdict_of(row.estimate)))
    costs = timing.hours_headers([e.cost for e in estimates])
    return found + [
        (of, lambda row, n=n: timing.hours_cells(row.estimate.cost)[n])
        for n, of in enumerate(costs)
    ]


def _size(name: str, row: Row) -> doc.Cell:
    return doc.count_cell(row.sizes[name])


def _rate_cell(row: Row) -> doc.Cell:
    predicted = row.estimate.throughput
    bound = "up to " if predicted and not predicted.is_whole else ""
    return doc.Number(row.rate, f"{bound}{row.rate:,.0f}" if row.rate else "")


def _needs(row: Row) -> doc.Cell:
    estimate = row.estimate
    text = NOT_RECORDED if estimate.as_eager else total_text(estimate)
    return doc.Number(estimate.device_total_bytes, text)


def _efficiency(row: Row) -> doc.Cell:
    share = row.scaled.efficiency if row.scaled else None
    return doc.Number(share, "" if share is None else f"{share:.0%}")


def _memory(rows: Sequence[Row]) -> list[Column]:
    """Between what it is expected, and the parts of it, where the step itself is known."""

    def column(name: str, size: Callable[[Estimate], int]) -> Column:
        def show(row: Row) -> doc.Cell:
            found = row.estimate
            return doc.Number(None, NOT_RECORDED) if found.as_eager else doc.bytes_cell(size(found))

        return name, show

    has: Column = ("has", lambda row: doc.bytes_cell(row.estimate.budget_bytes or 0))
    between: Column = ("between", lambda row: between_text(row.estimate))
    return [
        between,
        *([has] if any(row.estimate.budget_bytes for row in rows) else []),
        column("saved", lambda e: e.saved_activation_bytes),
        column("allocated", lambda e: e.peak_allocated_bytes),
        column("reserved", lambda e: e.peak_reserved_bytes),
    ]


def _steps(rows: Sequence[Row], keys: list[Column], own: list[Column]) -> list[doc.Part]:
    """The step of each; of several devices what they lose."""
    if not any(row.rate for row in rows):
        return []
    columns: list[Column] = [*keys, ("step", _step)]
    lines = []
    if any(row.scaled for row in rows):
        batch = lambda row: doc.count_cell(row.estimate.setting.global_batch)  # noqa: E731
        columns += [("exposed", _exposed), ("global batch", batch)]
        above = any(r.scaled and (r.scaled.efficiency or 0) >= 1.005 for r in rows)
        why = " (above 100%: each updates only its share of the weights)" if above else ""
        lines.append(
            f"Efficiency: against as many GPUs that each work by themselves{why}. "
            "Exposed: the part of a step in which a GPU only waits for the others."
        )
    return [
        doc.Folded("step of each", [_table(rows, [*columns, *own]), doc.Text("\n".join(lines))])
    ]


def _step(row: Row) -> doc.Cell:
    predicted = row.estimate.throughput
    return doc.seconds_cell(predicted.step_seconds if predicted else None)


def _exposed(row: Row) -> doc.Cell:
    """Of a step, in which devices only wait for each other."""
    predicted = row.estimate.throughput
    if predicted is None or row.estimate.setting.world_size == 1:
        return doc.Number(None, "")
    sent = predicted.communication
    return doc.seconds_cell(sent.exposed_seconds) if sent else doc.Number(None, "not known")


def range_notes(found: Sequence[Estimate]) -> list[str]:
    """What the rates of several rest on, and what a whole training's figures are of."""
    bases = dict.fromkeys(e.throughput.basis for e in found if e.throughput is not None)
    return [*(f"images/s: {basis}" for basis in bases),
            *timing.hours_notes([e.cost for e in found], found[0].unit)]  # fmt: skip


def _of_rows(lines: Sequence[Sequence[str]]) -> list[str]:
    """What the rows rest on, each once; the JSON of each has its own."""
    counts = Counter(line for of_row in lines for line in dict.fromkeys(of_row))
    found = [f"{'some rows: ' * (n < len(lines))}{line}" for line, n in counts.items()]
    more = len(found) - MAX_NOTES
    return [
        *found[:MAX_NOTES],
        *([f"{more} more, of some rows: one setting by itself shows its own"] if more > 0 else []),
    ]
