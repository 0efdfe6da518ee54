"""What an emulated program needed: the verdict first."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from planner.core.errors import printable
from planner.core.failures import SIGNS
from planner.core.units import format_bytes
from planner.machine.hardware.overheads import CONTEXT_BYTES_HIGH
from planner.report.explanation import relief_parts
from planner.report.page.contents import (
    Cell,
    Copyable,
    Facts,
    Folded,
    Group,
    Number,
    Page,
    Part,
    Section,
    Table,
    Text,
    Verdict,
    VerdictKind,
    bytes_cell,
    count_cell,
)
from planner.report.text import parts_text
from planner.watching.emulating.reading import (
    ELSE,
    DevicePeak,
    EmulatedProcess,
    EmulatedRun,
    Growth,
    KnownRelief,
    OutOfMemory,
)
from planner.watching.emulating.running import EXPANDABLE
from planner.watching.emulating.varying import Variation
from planner.watching.explaining.snapshot_reading import Group as Held

MAX_GROUPS = 12
MANY_FORWARDS = 4  # more than a step of several models has before its backward
FRAGMENTS = f"PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE} (torch 2.1 or later)"
NODES = "$NNODES, $NODE_RANK, $MASTER_ADDR and $MASTER_PORT"
RETRIES = (
    "Retries: the allocator had no memory left, gave its cache back to the driver and asked again. "
    "On a real card each waits for the device: take a smaller value for speed."
)
SELECTS = (
    "Its steps select by values on the GPU (a boolean index, nonzero, masked_select, unique or "
    "bincount), which nothing computed: masks select nothing here, and unique finds one value. A "
    "real card may need more."
)
NOT_EMULATED = re.compile(r"CU\w+_NOT_SUPPORTED|operation not supported|No execution plans support")
NO_SUCH_FUNCTION = "The emulated GPU has no such function: the program is not at fault."
BY_VALUES = "AssertionError", "ValueError", "IndexError", "KeyError", "ZeroDivisionError"
NO_VALUES = "If that follows from a value on the GPU, it proves nothing: none was computed."
CAVEAT = (
    "Emulated: torch's own CUDA code asked for this memory, and its kernels computed nothing. "
    "Losses and outputs are no results, and no time says anything. What cuDNN, cuBLAS and NCCL "
    "take for themselves, and the CUDA context (assumed), may differ on a real card."
)


def emulation_text(run: EmulatedRun) -> str:
    return parts_text(emulation_answer(run))


def variation_text(variation: Variation) -> str:
    return parts_text(variation_answer(variation))


def emulation_answer(run: EmulatedRun) -> list[Part]:
    """Whether it fits, the peak and what was alive then, each rank, and what grew."""
    fullest = run.fullest
    parts: list[Part] = [Text("\n".join(answer(run)))]
    parts += [Text(SELECTS)] if run.selects else []
    parts += known_levers(run.relief) if run.relief is not None else []
    if run.out_of_memory is not None:
        parts.append(_alive(run.out_of_memory.groups, "Alive when it ran out of memory:"))
    elif fullest is not None and fullest.fullest is not None:
        parts.append(_alive(fullest.fullest.groups, f"Alive at the peak of {title_of(fullest)}:"))
    if sum(bool(p.peaks) for p in run.processes) > 1:
        parts.append(_processes(run.processes))
    if run.fits and run.retries:
        parts.append(Text(f"{run.retries} {RETRIES.lower()}"))
    for process in run.processes:
        if process.growth is not None:
            parts += [
                Text(grew(process, process.growth)),
                _alive(process.growth.groups, "", "more"),
            ]
    faults = sorted({fault for process in run.processes for fault in process.faults})
    parts += [Text(f"Our record of it may miss something: {fault}") for fault in faults]
    return [*parts, Text(CAVEAT, "note")]


def emulated_page(run: EmulatedRun, made: str = "") -> Page:
    """The same answer, and what each process had alive. `made` as a `Page`'s."""
    kinds: dict[bool | None, VerdictKind] = {True: "fits", False: "no", None: "unknown"}
    parts: list[Part] = [Verdict(kinds[run.fits]), *_tiles(run), *emulation_answer(run)]
    parts.append(Copyable(shlex.join(run.command), "The program"))
    parts += [
        Folded(f"{title_of(process)} at its peak", [_alive(process.fullest.groups)])
        for process in run.processes
        if process.fullest is not None and process.fullest.groups and process is not run.fullest
    ]
    title = f"{' '.join(run.command[:3])} on {run.gpu}"
    return Page(title, "", [Group("run", "", [Section("answer", "Answer", parts)])], made)


def _tiles(run: EmulatedRun) -> list[Part]:
    peak = run.fullest.fullest if run.fullest else None
    if peak is None:
        return []
    figures = [
        (f"needed of {format_bytes(peak.total_bytes)}", format_bytes(peak.used_bytes)),
        ("torch allocates", format_bytes(peak.allocated_bytes)),
        ("torch reserves", format_bytes(peak.reserved_bytes)),
        ("steps", str(run.steps)),
    ]
    return [Facts(figures, "tiles")]


def variation_answer(variation: Variation) -> list[Part]:
    rows: list[list[Cell]] = []
    ended = variation.next_larger if variation.last_line is not None else None
    for value, run in sorted(variation.runs.items()):
        peak = run.fullest.fullest if run.fullest else None
        fits = "not known" if value == ended else "yes" if run.fits_so_far else "no"
        used, retries = (peak.used_bytes, peak.retries) if peak else (None, None)
        rows.append([count_cell(value), fits, bytes_cell(used), count_cell(retries)])
    if variation.last_line is not None:
        first = _ended_early(variation, variation.last_line)
    elif (run := next(iter(variation.runs.values()))).lacks_context:
        first = _no_context(run)
    elif not variation.largest:
        first = f"Not even {variation.argument} 1 fits."
    elif all(run.fits_so_far for run in variation.runs.values()):
        first = (
            f"{variation.argument} {variation.largest} fits, and no value that was tried does not. "
            "Does the program make such a batch of its data?"
        )
    else:
        first = (
            f"{variation.argument} {variation.largest} is the largest that fits; "
            f"{variation.next_larger} does not."
        )
    doubts = variation.runs[variation.largest].doubts if variation.largest else ()
    runs = variation.runs.values()
    return [
        Text(first),
        *(Text(f"But {doubt}.") for doubt in doubts),
        *([Text(SELECTS)] if any(run.selects for run in runs) else []),
        Table((variation.argument, "fits", "device total", "retries"), rows, first=len(rows)),
        *([Text(RETRIES)] if any(run.fits_so_far and run.retries for run in runs) else []),
        Text(CAVEAT, "note"),
    ]


def _ended_early(variation: Variation, last_line: str) -> str:
    value = variation.next_larger
    largest = f"{variation.argument} {variation.largest} is the largest"
    known = largest if variation.largest else "No value is"
    ended = f"With {value} the program ended by itself ({_ended(variation.runs[value])})"
    said = f", and said last: {printable(last_line)}" if last_line else ", and said nothing."
    return f"{known} known to fit.\n{ended}{said}"


def answer(run: EmulatedRun) -> list[str]:
    """Lines: whether it fits, by how much, and where the peak is."""
    failed, fullest = run.out_of_memory, run.fullest
    if failed is not None and failed.is_absurd:
        first = (
            f"Not known: {format_bytes(failed.requested_bytes)} were asked for at once, "
            f"{failed.requested_bytes // failed.total_bytes:,} times what the card has. The "
            "emulated GPU did not compute the value that it follows from, or it is the program's "
            "fault."
        )
        return [first, f"Where: {place_of(failed)}."]
    if failed is not None:
        return _does_not_fit(run, failed)
    if run.lacks_context:
        return [_no_context(run)]
    if not run.is_recorded:
        return [
            f"Not known: no Python of the program loaded our record (exit status {run.status}), "
            "which it finds by PYTHONPATH. Start python without -I, -E and -S, and do not set "
            "PYTHONPATH anew."
        ]
    if run.is_apart:
        return [
            f"Not known: the {run.nodes} nodes did not train together, as each had the same ranks. "
            "torchrun joins them by itself where its command says nothing of nodes; hand any other "
            f"launcher {NODES}, as \"sh -c '…'\" can."
        ]
    if fullest is None or not fullest.peaks:
        why = "no process used the GPU through torch. Does it train on 'cuda', by a CUDA build?"
        if run.processes or run.status:
            why = f"it ended (exit status {run.status}) before a step of it was seen."
        return [f"Not known: {why} What it printed last is above.", *_error(run)]
    peak = fullest.fullest
    assert peak is not None
    total, spare = format_bytes(peak.total_bytes), format_bytes(peak.spare_bytes)
    used = f"{format_bytes(peak.used_bytes)} at most, {spare} to spare"
    more = _error(run)
    if run.doubts or run.is_cut:
        first = f"Fits for the {run.steps} steps that were run, in {total} of {run.gpu}: {used}."
        if run.is_cut:
            such = "" if any(p.is_evaluated for p in run.processes) else ", such as an evaluation"
            more = [f"Not run: what comes after them{such}. Without --steps it runs to its end."]
        more[:0] = [f"Not known beyond: {doubt}." for doubt in run.doubts]
    else:
        first = f"Fits in {total} of {run.gpu}: {used} ({_ended(run)})."
        more += [f"Room is left for it, though {text}." for _, text in run.grows]
    if not run.fits_so_far:
        first = f"Not known whether a training fits: no optimizer of torch made a step. {used}."
        if run.steps or run.status:
            why = ", and the second step is the first with all of an optimizer's state"
            first = f"Not known whether it fits: it ended early ({_ended(run)})"
            first += f"{'' if run.error else why}. Until then {used}."
        more = _error(run)
    elif peak.spare_bytes < (unsure := CONTEXT_BYTES_HIGH - run.context_bytes):
        more.append(f"Barely: a real CUDA context may take {format_bytes(unsure)} more.")
    return [first, *more, _figures(peak)]


def _error(run: EmulatedRun) -> list[str]:
    """What it means that the program ended by, but for a want of memory."""
    if not run.error or "OutOfMemoryError" in run.error:
        return []
    said = f"It ended by {printable(run.error).splitlines()[0].rstrip('.')}"
    if sign := next((sign for sign in SIGNS if sign.is_sure(run.error)), None):
        return [f"{said}: {sign.means} {' '.join(sign.todo())}"]
    if NOT_EMULATED.search(run.error):
        return [f"{said}. {NO_SUCH_FUNCTION}"]
    return [f"{said}. {NO_VALUES}" if run.error.startswith(BY_VALUES) else f"{said}."]


def _no_context(run: EmulatedRun) -> str:
    return (
        f"Does not fit in {format_bytes(run.memory_bytes)} of {run.gpu}: the CUDA context alone "
        f"needs {format_bytes(run.context_bytes)} (assumed), and {format_bytes(run.free_bytes)} "
        "are free."
    )


def _does_not_fit(run: EmulatedRun, failed: OutOfMemory) -> list[str]:
    missing = format_bytes(failed.missing_bytes)
    return [
        f"Does not fit in {format_bytes(failed.total_bytes)} of {run.gpu}: out of memory in step "
        f"{failed.step} ({_ended(run)}).",
        f"{format_bytes(failed.requested_bytes)} were asked for with "
        f"{format_bytes(failed.free_bytes)} free: at least {missing} are missing. torch had "
        f"{format_bytes(failed.allocated_bytes)} allocated and "
        f"{format_bytes(failed.reserved_bytes)} reserved.",
        f"Where: {place_of(failed)}.",
        *_went_on(run, failed),
        *_error(run),
        *(_by_kind(run, failed) if run.relief is None or failed.is_fragmented else []),
    ]


def _by_kind(run: EmulatedRun, failed: OutOfMemory) -> list[str]:
    """What helps any model, by the state of the allocator and what was alive."""
    alive = max(sum(group.num_bytes for group in failed.groups), 1)
    if failed.requested_bytes > failed.total_bytes:
        said = "this one request is more than the whole card: ask for less at once there."
    elif failed.grown_bytes:
        grown = format_bytes(failed.grown_bytes)
        said = f"each step left {grown} more alive. Keep no losses, outputs or gradients."
    elif failed.is_fragmented:
        said = (
            f"torch held {format_bytes(failed.unused_bytes)} in free pieces, each too small. "
            f"{_expanded(run.expanded)}"
        )
    elif failed.forwards >= MANY_FORWARDS:
        said = (
            f"{failed.forwards} forwards had run since the last backward, and kept what it would "
            "need. An evaluation belongs under torch.no_grad(); of a loss that is summed up keep "
            "loss.detach()."
        )
    elif failed.state_bytes >= alive / 2:
        said = (
            f"{failed.state_bytes / alive:.0%} of what was alive is parameters and optimizer "
            "state, which no smaller batch frees: an optimizer with less state, LoRA, or sharding "
            "over more GPUs needs less."
        )
    elif failed.batch_bytes >= alive / 2 or not failed.groups:
        said = (
            f"{failed.batch_bytes / alive:.0%} of what was alive is activations and batches, which "
            "grow with the batch: a smaller one with accumulation, checkpointing, or bf16 autocast "
            "where it is off needs less; --vary ARGUMENT finds the largest that fits."
        )
    else:
        first = failed.groups[0]
        said = (
            f"the largest part of what was alive, {first.num_bytes / alive:.0%}, was asked for by "
            f"one line, in {first.count} pieces: {first.where}."
        )
    return [f"Next: {said}"]


def _expanded(again: EmulatedRun | None) -> str:
    """What a second run with expandable segments came to."""
    if again is None:
        return f"Run it with {FRAGMENTS}: they may join."
    said, peak, failed = f"A second run with {FRAGMENTS}", again.fullest, again.out_of_memory
    if failed is not None:
        return f"{said} ran out of memory too, in step {failed.step}."
    if not again.fits_so_far or peak is None or peak.fullest is None:
        return f"{said} ended early ({_ended(again)}), and so tells nothing."
    reserved, spare = map(format_bytes, (peak.fullest.reserved_bytes, peak.fullest.spare_bytes))
    doubts = "".join(f" Not known beyond: {doubt}." for doubt in again.doubts)
    return f"{said} fits: it reserved {reserved} at most, with {spare} to spare.{doubts}"


def known_levers(known: KnownRelief) -> list[Part]:
    """What `planner advise` says of the model that was seen."""
    setting = ", ".join(f"{key} {value}" for key, value in known.setting.items())
    first = (
        f"The program trains {known.model} ({setting}), by its class and number of parameters. "
        "For a plain step of that, which the program's own may differ from:"
    )
    return [Text(first), *relief_parts(known.relief)]


def _went_on(run: EmulatedRun, failed: OutOfMemory) -> list[str]:
    """Where the program caught the error: what it is after that is no longer what was asked."""
    if run.status or run.steps < failed.step:
        return []
    times = "once" if failed.times == 1 else f"{failed.times} times"
    return [f"The program caught that {times} and went on, to {_ended(run)}."]


def _ended(run: EmulatedRun) -> str:
    steps = f"{run.steps} step{'' if run.steps == 1 else 's'}"
    is_told = run.status and not run.is_interrupted
    return f"{steps}, exit status {run.status}" if is_told else steps


def _figures(peak: DevicePeak) -> str:
    return (
        f"torch allocates {format_bytes(peak.allocated_bytes)} at most and reserves "
        f"{format_bytes(peak.reserved_bytes)}; {format_bytes(peak.outside_bytes)} are outside of "
        f"it. Peak: step {peak.step}, {place_of(peak)}."
    )


def place_of(found: DevicePeak | OutOfMemory) -> str:
    """`backward of Net.layers.0.mlp, train.py:7 main`."""
    if found.phase == ELSE:
        return found.where
    of = f" of {printable(found.module)}" if found.module else ""
    return f"{found.phase}{of}, {found.where}"


def title_of(process: EmulatedProcess) -> str:
    return f"process {process.pid}" if process.rank is None else f"rank {process.rank}"


def card_of(process: EmulatedProcess, peak: DevicePeak) -> str:
    return f"{peak.device} of node {process.node}" if process.node else str(peak.device)


def _alive(groups: Sequence[Held], title: str = "", size: str = "memory") -> Table:
    total = max(sum(group.num_bytes for group in groups), 1)
    rest = groups[MAX_GROUPS:]
    shown = [(g.num_bytes, g.count, g.category, g.where) for g in groups[:MAX_GROUPS]]
    if rest:
        num_bytes = sum(group.num_bytes for group in rest)
        shown.append((num_bytes, sum(group.count for group in rest), "the rest", ""))
    rows: list[list[Cell]] = [
        [bytes_cell(n), Number(n, f"{n / total:.0%}"), count_cell(count), what, where]
        for n, count, what, where in shown
    ]
    headers = (size, "share", "tensors", "what", "asked for by")
    return Table(headers, rows, title, first=len(rows))


def _processes(processes: Sequence[EmulatedProcess]) -> Table:
    rows: list[list[Cell]] = [
        [
            title_of(process), card_of(process, peak), count_cell(process.steps),
            *map(bytes_cell, (peak.allocated_bytes, peak.reserved_bytes, peak.used_bytes)),
            place_of(peak),
        ]
        for process in processes
        for peak in process.peaks
    ]  # fmt: skip
    headers = ("process", "GPU", "steps", "allocated", "reserved", "device total", "peak")
    return Table(headers, rows, first=len(rows))


def grew(process: EmulatedProcess, growth: Growth) -> str:
    return (
        f"Grew in {title_of(process)}: {format_bytes(growth.bytes_per_step)} a step from step "
        f"{growth.from_step} to {growth.to_step}. Does the program keep losses, outputs or "
        "gradients?"
    )
