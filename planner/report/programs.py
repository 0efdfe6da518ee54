"""A person's own program as an answer: what an emulated one needed, and why one ended."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.core.errors import printable
from planner.core.failures import SAID, SIGNS, sentence
from planner.core.units import format_bytes, format_rate
from planner.programs.emulated import (
    ELSE,
    DevicePeak,
    EmulatedProcess,
    EmulatedRun,
    OutOfMemory,
)
from planner.programs.explanation import MANY, Diagnosis, Explanation, Relief
from planner.programs.running import Variation
from planner.programs.snapshots import NO_STACK, Blocks, SnapshotReading
from planner.report.advice import ways_table
from planner.report.page import contents as doc
from planner.report.text import parts_text

MAX_GROUPS = 7  # with the verdict and the rest on a first screen; JSON has all
NEXT = "Next: --vary ARG, as --vary --batch-size, finds the largest value that fits: some minutes."
MANY_FORWARDS = 4  # more than a step of several models has before its backward
NOT_EMULATED = re.compile(r"CU\w+_NOT_SUPPORTED|operation not supported|No execution plans support")
BY_VALUES = "AssertionError", "ValueError", "IndexError", "KeyError", "ZeroDivisionError"


def _said(key: str) -> doc.Text:
    return doc.Text(sentence(f"emulated: {key}"))


def _sizes(found: object) -> dict[str, int]:
    """What is known of it in bytes, by name."""
    return {name: getattr(found, name) for name in dir(found) if name.endswith("_bytes")}


def emulation_text(run: EmulatedRun) -> str:
    return parts_text(emulation_answer(run))


def variation_text(variation: Variation) -> str:
    return parts_text(variation_answer(variation))


def emulation_answer(run: EmulatedRun) -> list[doc.Part]:
    """Whether it fits, the peak and what was alive then, each rank, and what grew."""
    fullest = run.fullest
    parts: list[doc.Part] = [doc.Text("\n".join(verdict_lines(run)))]
    parts += [_said("selects")] if run.selects else []
    if run.out_of_memory is not None:
        parts.append(_alive(run.out_of_memory.groups, "Alive when it ran out of memory:"))
    elif fullest is not None and fullest.fullest is not None:
        parts.append(_alive(fullest.fullest.groups, f"Alive at the peak of {title_of(fullest)}:"))
    if sum(bool(p.peaks) for p in run.processes) > 1:
        parts.append(_processes(run.processes))
    if run.fits and run.retries:
        parts.append(doc.Text(f"{run.retries} {sentence('emulated: retries').lower()}"))
    for process in run.processes:
        if (grown := process.growth) is not None:
            size, who = format_bytes(grown.bytes_per_step), title_of(process)
            steps: dict[str, Any] = {"first": grown.from_step, "last": grown.to_step}
            said = sentence("emulated: grew", process=who, size=size, **steps)
            parts += [doc.Text(said), _alive(grown.groups, size="more")]
    faults = sorted({fault for process in run.processes for fault in process.faults})
    parts += [doc.Text(f"Our record of it may miss something: {fault}") for fault in faults]
    return [*parts, _said("caveat"), *([doc.Text(NEXT)] if run.fits else [])]


def emulated_page(run: EmulatedRun, made: str = "") -> doc.Page:
    """The same answer. `made` as a `Page`'s."""
    kinds: dict[bool | None, doc.VerdictKind] = {True: "fits", False: "no", None: "unknown"}
    program = doc.Copyable(shlex.join(run.command), "The program")
    sections = doc.sections_of([doc.Verdict(kinds[run.fits]), *emulation_answer(run), program])
    title = f"{' '.join(run.command[:3])} on {run.gpu}"
    return doc.Page(title, "", [doc.Group("run", "", sections)], made)


def variation_answer(variation: Variation) -> list[doc.Part]:
    rows: list[list[doc.Cell]] = []
    ended = variation.next_larger if variation.last_line is not None else None
    for value, run in sorted(variation.runs.items()):
        peak = run.fullest.fullest if run.fullest else None
        sure = "yes" if run.fits_surely else "probably"
        fits = "not known" if value == ended else sure if run.fits_so_far else "no"
        used, retries = (peak.used_bytes, peak.retries) if peak else (None, None)
        rows.append([doc.count_cell(value), fits, doc.bytes_cell(used), doc.count_cell(retries)])
    words: dict[str, Any] = {"argument": variation.argument, "largest": variation.largest}
    if variation.last_line is not None:
        first = _ended_early(variation, variation.last_line)
    elif (run := next(iter(variation.runs.values()))).lacks_context:
        first = _no_context(run)
    elif not variation.largest:
        first = f"Not even {variation.argument} 1 surely fits."
    elif all(run.fits_surely for run in variation.runs.values()):
        first = sentence("emulated: vary all fit", **words)
    else:
        first = sentence("emulated: vary", **words, next=variation.next_larger)
    doubts = variation.runs[variation.largest].doubts if variation.largest else ()
    runs = variation.runs.values()
    most = max((value for value, run in variation.runs.items() if run.fits_so_far), default=0)
    if most > variation.largest:
        first += sentence("emulated: vary probably", most=most)
    return [
        doc.Text(first),
        *(doc.Text(f"But {doubt}.") for doubt in doubts),
        *([_said("selects")] if any(run.selects for run in runs) else []),
        doc.Table((variation.argument, "fits", "device total", "retries"), rows, first=len(rows)),
        *([_said("retries")] if any(run.fits_so_far and run.retries for run in runs) else []),
        _said("caveat"),
    ]


def _ended_early(variation: Variation, last_line: str) -> str:
    value = variation.next_larger
    largest = f"{variation.argument} {variation.largest} is the largest"
    return sentence(
        "emulated: vary ended", known=largest if variation.largest else "No value is", value=value,
        ended=_ended(variation.runs[value]),
        said=f", and said last: {printable(last_line)}" if last_line else ", and said nothing.",
    )  # fmt: skip


def verdict_lines(run: EmulatedRun) -> list[str]:
    """Lines: whether it fits, by how much, and where the peak is."""
    failed, peak = run.out_of_memory, run.fullest.fullest if run.fullest else None
    if failed is not None and failed.is_absurd:
        times = failed.requested_bytes // failed.total_bytes
        where = place_of(failed)
        return [sentence("emulated: absurd", _sizes(failed), times=times, where=where)]
    if failed is not None:
        return _does_not_fit(run, failed)
    if run.lacks_context:
        return [_no_context(run)]
    if not run.is_recorded:
        return [sentence("emulated: not recorded", status=run.status)]
    if peak is None:
        key = "no step" if run.processes or run.status else "no GPU"
        return [sentence(f"emulated: {key}", status=run.status), *_error(run)]
    total, spare = format_bytes(peak.total_bytes), format_bytes(peak.spare_bytes)
    used = f"{format_bytes(peak.used_bytes)} at most, {spare} to spare"
    more = _error(run)
    if run.doubts or run.is_cut:
        first = f"Fits for the {run.steps} steps that were run, in {total} of {run.gpu}: {used}."
        if run.is_cut:
            such = "" if any(p.is_evaluated for p in run.processes) else ", such as an evaluation"
            more = [sentence("emulated: not run", such=such)]
        more[:0] = [f"Not known beyond: {doubt}." for doubt in run.doubts]
    else:
        first = f"Fits in {total} of {run.gpu}: {used} ({_ended(run)})."
        more += [f"Room is left for it, though {text}." for _, text in run.grows]
    if not run.fits_so_far:
        first = sentence("emulated: no optimizer", used=used)
        if run.steps or run.status:
            why = ", and the second step is the first with all of an optimizer's state"
            why = "" if run.error else why
            first = sentence("emulated: ended early", ended=_ended(run), why=why, used=used)
        more = _error(run)
    elif peak.spare_bytes < run.unsure_bytes:
        more.append(f"Barely: a real CUDA context may take {format_bytes(run.unsure_bytes)} more.")
    when = f"step {peak.step}" if peak.step <= run.steps else f"after step {run.steps}"
    figures = sentence("emulated: figures", _sizes(peak), when=when, where=place_of(peak))
    return [first, *more, figures]


def _error(run: EmulatedRun) -> list[str]:
    """What it means that the program ended by, but for a want of memory."""
    if not run.error or "OutOfMemoryError" in run.error:
        return []
    said = f"It ended by {printable(run.error).splitlines()[0].rstrip('.')}"
    if sign := next((sign for sign in SIGNS if sign.is_sure(run.error)), None):
        return [f"{said}: {sign.means} {' '.join(sign.told())}"]
    if NOT_EMULATED.search(run.error):
        return [sentence("emulated: no such function", said=said)]
    is_of_values = run.error.startswith(BY_VALUES)
    return [sentence("emulated: by values", said=said) if is_of_values else f"{said}."]


def _no_context(run: EmulatedRun) -> str:
    return sentence("emulated: no context", _sizes(run), gpu=run.gpu)


def _does_not_fit(run: EmulatedRun, failed: OutOfMemory) -> list[str]:
    words: dict[str, Any] = {"gpu": run.gpu, "step": failed.step, "ended": _ended(run)}
    where = place_of(failed)
    lines = [sentence("emulated: does not fit", _sizes(failed), where=where, **words)]
    if not run.status and run.steps >= failed.step:  # what is after that is not what was asked
        times = "once" if failed.times == 1 else f"{failed.times} times"
        lines.append(sentence("emulated: went on", times=times, ended=_ended(run)))
    return [*lines, *_error(run), _by_kind(failed)]


def _by_kind(failed: OutOfMemory) -> str:
    """What helps any model, by the state of the allocator and what was alive."""
    alive, sizes = max(sum(group.num_bytes for group in failed.groups), 1), _sizes(failed)
    if failed.requested_bytes > failed.total_bytes:
        return sentence("emulated: one request")
    if failed.grown_bytes:
        return sentence("emulated: grown", sizes)
    if failed.is_fragmented:
        return sentence("emulated: fragments", sizes)
    if failed.forwards >= MANY_FORWARDS:
        return sentence("emulated: forwards", forwards=failed.forwards)
    if failed.state_bytes >= alive / 2:
        return sentence("emulated: state", share=failed.state_bytes / alive)
    if failed.batch_bytes >= alive / 2 or not failed.groups:
        return sentence("emulated: batch", share=failed.batch_bytes / alive)
    first = failed.groups[0]
    words: dict[str, Any] = {"count": first.count, "where": first.where}
    return sentence("emulated: largest", share=first.num_bytes / alive, **words)


def _ended(run: EmulatedRun) -> str:
    steps = f"{run.steps} step{'' if run.steps == 1 else 's'}"
    is_told = run.status and not run.is_interrupted
    return f"{steps}, exit status {run.status}" if is_told else steps


def place_of(found: DevicePeak | OutOfMemory) -> str:
    """`backward of Net.layers.0.mlp, train.py:7 main`."""
    if found.phase == ELSE:
        return found.where
    of = f" of {printable(found.module)}" if found.module else ""
    return f"{found.phase}{of}, {found.where}"


def title_of(process: EmulatedProcess) -> str:
    return f"process {process.pid}" if process.rank is None else f"rank {process.rank}"


def _alive(groups: Sequence[Blocks], title: str = "", size: str = "memory") -> doc.Table:
    total = max(sum(group.num_bytes for group in groups), 1)
    rest = groups[MAX_GROUPS:]
    shown = [(g.num_bytes, g.count, g.category, g.where) for g in groups[:MAX_GROUPS]]
    if rest:
        num_bytes = sum(group.num_bytes for group in rest)
        shown.append((num_bytes, sum(group.count for group in rest), "the rest", ""))
    rows: list[list[doc.Cell]] = [
        [doc.bytes_cell(n), doc.Number(n, f"{n / total:.0%}"), doc.count_cell(count), what, where]
        for n, count, what, where in shown
    ]
    headers = (size, "share", "tensors", "what", "asked for by")
    return doc.Table(headers, rows, title, first=len(rows))


def _processes(processes: Sequence[EmulatedProcess]) -> doc.Table:
    rows: list[list[doc.Cell]] = [
        [
            title_of(process), str(peak.device), doc.count_cell(process.steps),
            *map(doc.bytes_cell, (peak.allocated_bytes, peak.reserved_bytes, peak.used_bytes)),
            place_of(peak),
        ]
        for process in processes
        for peak in process.peaks
    ]  # fmt: skip
    headers = ("process", "GPU", "steps", "allocated", "reserved", "device total", "peak")
    return doc.Table(headers, rows, first=len(rows))


MAX_WAYS = 3


def explanation_text(found: Explanation) -> str:
    """What would help, where that is known; what was seen, what it means and what to do; then what
    was alive."""
    relief = relief_parts(found.relief) if found.relief is not None else []
    differs: list[doc.Part] = [doc.Text("\n".join(found.differs))]
    total = found.seen.get("total_bytes") or (found.expected and found.expected.budget_bytes)
    # Where the setting fits by prediction, no change of it is what helps first.
    fits = bool(found.expected and total and found.expected.device_total_bytes <= total)
    parts, last = (differs, relief) if fits else (relief, differs)
    if not found.findings and found.kind == "log":
        parts.append(doc.Text(sentence("nothing recognised", source=found.source)))
    parts += [doc.Text("\n".join(_finding(one))) for one in found.findings]
    rows: list[list[doc.Cell]] = [
        [name, doc.bytes_cell(found.seen[key])]
        for key, name in SAID["rows"].items()
        if key in found.seen
    ]
    parts.append(_table(("", ""), rows))
    if found.snapshot is not None:
        parts.append(doc.Text(sentence("free blocks", found.snapshot.figures)))
        parts += _at_the_failure(found.snapshot, found.expected.breakdown if found.expected else {})
    return parts_text([*parts, *last, doc.Text("\n".join(found.notes))])


def _table(headers: Sequence[str], rows: list[list[doc.Cell]]) -> doc.Table:
    """All of it: there is no other place to see more."""
    return doc.Table(headers, rows, first=len(rows))


def _finding(finding: Diagnosis) -> Iterator[str]:
    title = f"possibly {finding.kind}" if finding.apart else finding.kind
    more = " and more" if finding.count >= MANY else ""
    times = f" ({finding.count:,} times{more})" if finding.count > 1 else ""
    ranks = f", rank {', '.join(map(str, finding.ranks))}" if finding.ranks else ""
    yield f"{title[0].upper()}{title[1:]}{times}{ranks}: {finding.means}"
    yield from (f"  line {number}: {text}" for number, text in finding.evidence)
    yield from (f"- {text}" for text in finding.todo)
    if finding.apart:
        yield f"- To tell: {finding.apart}"


def _at_the_failure(reading: SnapshotReading, predicted: Mapping[str, int]) -> Iterator[doc.Part]:
    rows: list[list[doc.Cell]] = []
    for category, num_bytes in reading.categories.items():
        said = sum(predicted.get(key, 0) for key in SAID["breakdown"].get(category, ()))
        rows.append([category, doc.bytes_cell(num_bytes), doc.bytes_cell(said or None)])
    yield _table(("alive", "seen", "predicted at the peak"), rows).filled()
    if reading.categories.keys() != {NO_STACK}:
        places: list[list[doc.Cell]] = [
            [doc.bytes_cell(g.num_bytes), doc.count_cell(g.count), g.category, g.where]
            for g in reading.groups
        ]
        yield _table(("bytes", "blocks", "what", "where"), places)


def relief_parts(relief: Relief) -> list[doc.Part]:
    need, advice = f"{format_bytes(relief.needed_bytes)} must become free", relief.advice
    if advice is None or relief.why_none:
        return [doc.Text(f"{need}: {relief.why_none}.")]
    now = format_bytes(advice.plain.estimate.device_total_bytes)
    rate = f"{format_rate(advice.plain.images_per_second)} {advice.unit}/s on {advice.rated}"
    rate += "" if advice.gpu else " (name yours with --gpu)"
    said = f"{need}. As it is, it should need {now} and do {rate}; by prediction these free it"
    table = ways_table(advice, said)
    first = doc.Copyable(advice.ways[0].command, "The first")
    return [replace(table, rows=table.rows[:MAX_WAYS]), first]
