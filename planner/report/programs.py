"""A person's own program, for a terminal and a page: what it needed on an emulated GPU
(`emulation_answer`, `variation_answer`), and why it ended (`explanation_text`).
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.core.errors import printable
from planner.core.failures import SIGNS, TEXTS, sentence
from planner.core.units import format_bytes, format_rate
from planner.programs.emulated import ELSE, DevicePeak, EmulatedProcess, EmulatedRun, OutOfMemory
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
VALUE_ERRORS = "AssertionError", "ValueError", "IndexError", "KeyError", "ZeroDivisionError"


def _sentence_part(key: str) -> doc.Text:
    return doc.Text(sentence(f"emulated: {key}"))


def _byte_fields(record: object) -> dict[str, int]:
    """The fields and properties of a record that are in bytes, by name."""
    return {name: getattr(record, name) for name in dir(record) if name.endswith("_bytes")}


def emulation_text(run: EmulatedRun) -> str:
    return parts_text(emulation_answer(run))


def variation_text(variation: Variation) -> str:
    return parts_text(variation_answer(variation))


def emulation_answer(run: EmulatedRun) -> list[doc.Part]:
    """Whether a program fits, its peak and what was alive then, each rank, and what grew."""
    fullest = run.fullest
    parts: list[doc.Part] = [doc.Text("\n".join(verdict_lines(run)))]
    parts += [_sentence_part("selects")] if run.selects else []
    if run.out_of_memory is not None:
        parts.append(_alive_table(run.out_of_memory.groups, "Alive when it ran out of memory:"))
    elif fullest is not None and fullest.fullest is not None:
        title = f"Alive at the peak of {process_title(fullest)}:"
        parts.append(_alive_table(fullest.fullest.groups, title))
    if sum(bool(p.peaks) for p in run.processes) > 1:
        parts.append(_process_table(run.processes))
    if run.fits and run.retries:
        parts.append(doc.Text(f"{run.retries} {sentence('emulated: retries').lower()}"))
    for process in run.processes:
        if (growth := process.growth) is not None:
            size, name = format_bytes(growth.bytes_per_step), process_title(process)
            steps: dict[str, Any] = {"first": growth.from_step, "last": growth.to_step}
            text = sentence("emulated: grew", process=name, size=size, **steps)
            parts += [doc.Text(text), _alive_table(growth.groups, size="more")]
    faults = sorted({fault for process in run.processes for fault in process.faults})
    parts += [doc.Text(f"Our record of it may miss something: {fault}") for fault in faults]
    return [*parts, _sentence_part("caveat"), *([doc.Text(NEXT)] if run.fits else [])]


def emulated_page(run: EmulatedRun, footer: str = "") -> doc.Page:
    """The answer on a run as a page, with its footer."""
    kinds: dict[bool | None, doc.VerdictKind] = {True: "fits", False: "no", None: "unknown"}
    program = doc.Copyable(shlex.join(run.command), "The program")
    sections = doc.make_sections([doc.Verdict(kinds[run.fits]), *emulation_answer(run), program])
    title = f"{' '.join(run.command[:3])} on {run.gpu}"
    return doc.Page(title, [doc.Group("run", "", sections)], footer)


def variation_answer(variation: Variation) -> list[doc.Part]:
    """The largest value of an argument with which a program fits, and a row for each that ran."""
    rows: list[list[doc.Cell]] = []
    ended_value = variation.next_larger if variation.last_line is not None else None
    for value, run in sorted(variation.runs.items()):
        peak = run.fullest.fullest if run.fullest else None
        surely = "yes" if run.fits_surely else "probably"
        fits = "not known" if value == ended_value else surely if run.fits_so_far else "no"
        used, retries = (peak.used_bytes, peak.retries) if peak else (None, None)
        rows.append([doc.count_cell(value), fits, doc.bytes_cell(used), doc.count_cell(retries)])
    figures: dict[str, Any] = {"argument": variation.argument, "largest": variation.largest}
    runs = variation.runs.values()
    if variation.last_line is not None:
        verdict = _ended_early(variation, variation.last_line)
    elif (run := next(iter(runs))).lacks_context:
        verdict = _no_context(run)
    elif not variation.largest:
        verdict = f"Not even {variation.argument} 1 surely fits."
    elif all(run.fits_surely for run in runs):
        verdict = sentence("emulated: vary all fit", **figures)
    else:
        verdict = sentence("emulated: vary", **figures, next=variation.next_larger)
    doubts = variation.runs[variation.largest].doubts if variation.largest else ()
    fitting = {value: run for value, run in variation.runs.items() if run.fits_so_far}
    if (largest := max(fitting, default=0)) > variation.largest:
        verdict += sentence("emulated: vary probably", most=largest)
    return [
        doc.Text(verdict),
        *(doc.Text(f"But {doubt}.") for doubt in doubts),
        *([_sentence_part("selects")] if any(run.selects for run in runs) else []),
        doc.Table((variation.argument, "fits", "device total", "retries"), rows, first=len(rows)),
        *([_sentence_part("retries")] if any(run.retries for run in fitting.values()) else []),
        _sentence_part("caveat"),
    ]


def _ended_early(variation: Variation, last_line: str) -> str:
    """What is known where the run of the next larger value ended before its steps did."""
    value = variation.next_larger
    largest = f"{variation.argument} {variation.largest} is the largest"
    return sentence(
        "emulated: vary ended", known=largest if variation.largest else "No value is", value=value,
        ended=_ending_text(variation.runs[value]),
        said=f", and said last: {printable(last_line)}" if last_line else ", and said nothing.",
    )  # fmt: skip


def verdict_lines(run: EmulatedRun) -> list[str]:
    """Whether a run fits, by how much, and where its peak is."""
    failed, peak = run.out_of_memory, run.fullest.fullest if run.fullest else None
    if failed is not None and failed.is_absurd:
        times = failed.requested_bytes // failed.total_bytes
        place = place_text(failed)
        return [sentence("emulated: absurd", _byte_fields(failed), times=times, where=place)]
    if failed is not None:
        return _out_of_memory_lines(run, failed)
    if run.lacks_context:
        return [_no_context(run)]
    if not run.is_recorded:
        return [sentence("emulated: not recorded", status=run.status)]
    if peak is None:
        key = "no step" if run.processes or run.status else "no GPU"
        return [sentence(f"emulated: {key}", status=run.status), *_error_lines(run)]
    total, spare = format_bytes(peak.total_bytes), format_bytes(peak.spare_bytes)
    used = f"{format_bytes(peak.used_bytes)} at most, {spare} to spare"
    ended, errors = _ending_text(run), _error_lines(run)
    if not run.fits_so_far and not (run.steps or run.status):
        lines = [sentence("emulated: no optimizer", used=used), *errors]
    elif not run.fits_so_far:
        reason = ", and the second step is the first with all of an optimizer's state"
        reason = "" if run.error else reason
        early = sentence("emulated: ended early", ended=ended, why=reason, used=used)
        lines = [early, *errors]
    elif run.doubts or run.is_cut:
        fits = f"Fits for the {run.steps} steps that were run, in {total} of {run.gpu}: {used}."
        example = "" if any(p.is_evaluated for p in run.processes) else ", such as an evaluation"
        lines = [fits, *(f"Not known beyond: {doubt}." for doubt in run.doubts)]
        lines += [sentence("emulated: not run", such=example)] if run.is_cut else errors
    else:
        lines = [f"Fits in {total} of {run.gpu}: {used} ({ended}).", *errors]
        lines += [f"Room is left for it, though {text}." for _, text in run.grows]
    if run.fits_so_far and peak.spare_bytes < run.unsure_bytes:
        extra = format_bytes(run.unsure_bytes)
        lines.append(f"Barely: a real CUDA context may take {extra} more.")
    moment = f"step {peak.step}" if peak.step <= run.steps else f"after step {run.steps}"
    figures = sentence("emulated: figures", _byte_fields(peak), when=moment, where=place_text(peak))
    return [*lines, figures]


def _error_lines(run: EmulatedRun) -> list[str]:
    """The error that ended the program, and what it means; nothing for an out-of-memory."""
    if not run.error or "OutOfMemoryError" in run.error:
        return []
    text = f"It ended by {printable(run.error).splitlines()[0].rstrip('.')}"
    if sign := next((sign for sign in SIGNS if sign.is_sure(run.error)), None):
        return [f"{text}: {sign.meaning} {' '.join(sign.ways_out())}"]
    if NOT_EMULATED.search(run.error):
        return [sentence("emulated: no such function", said=text)]
    is_of_values = run.error.startswith(VALUE_ERRORS)
    return [sentence("emulated: by values", said=text) if is_of_values else f"{text}."]


def _no_context(run: EmulatedRun) -> str:
    return sentence("emulated: no context", _byte_fields(run), gpu=run.gpu)


def _out_of_memory_lines(run: EmulatedRun, failed: OutOfMemory) -> list[str]:
    figures: dict[str, Any] = {"gpu": run.gpu, "step": failed.step, "ended": _ending_text(run)}
    place = place_text(failed)
    lines = [sentence("emulated: does not fit", _byte_fields(failed), where=place, **figures)]
    if not run.status and run.steps >= failed.step:  # what is after that is not what was asked
        times = "once" if failed.times == 1 else f"{failed.times} times"
        lines.append(sentence("emulated: went on", times=times, ended=_ending_text(run)))
    return [*lines, *_error_lines(run), _remedy_text(failed)]


def _remedy_text(failed: OutOfMemory) -> str:
    """What would help any model, by the state of the allocator and by what was alive."""
    alive, sizes = max(sum(group.num_bytes for group in failed.groups), 1), _byte_fields(failed)
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
    figures: dict[str, Any] = {"count": first.count, "where": first.where}
    return sentence("emulated: largest", share=first.num_bytes / alive, **figures)


def _ending_text(run: EmulatedRun) -> str:
    steps = f"{run.steps} step{'' if run.steps == 1 else 's'}"
    is_told = run.status and not run.is_interrupted
    return f"{steps}, exit status {run.status}" if is_told else steps


def place_text(peak: DevicePeak | OutOfMemory) -> str:
    """`backward of Net.layers.0.mlp, train.py:7 main`."""
    if peak.phase == ELSE:
        return peak.where
    of_module = f" of {printable(peak.module)}" if peak.module else ""
    return f"{peak.phase}{of_module}, {peak.where}"


def process_title(process: EmulatedProcess) -> str:
    return f"process {process.pid}" if process.rank is None else f"rank {process.rank}"


def _alive_table(groups: Sequence[Blocks], title: str = "", size: str = "memory") -> doc.Table:
    total = max(sum(group.num_bytes for group in groups), 1)
    hidden = groups[MAX_GROUPS:]
    shown = [(g.num_bytes, g.count, g.category, g.where) for g in groups[:MAX_GROUPS]]
    if hidden:
        num_bytes = sum(group.num_bytes for group in hidden)
        shown.append((num_bytes, sum(group.count for group in hidden), "the rest", ""))
    rows: list[list[doc.Cell]] = [
        [doc.bytes_cell(n), doc.Number(n, f"{n / total:.0%}"), doc.count_cell(count), kind, place]
        for n, count, kind, place in shown
    ]
    headers = (size, "share", "tensors", "what", "asked for by")
    return doc.Table(headers, rows, title, first=len(rows))


def _process_table(processes: Sequence[EmulatedProcess]) -> doc.Table:
    rows: list[list[doc.Cell]] = [
        [
            process_title(process), str(peak.device), doc.count_cell(process.steps),
            *map(doc.bytes_cell, (peak.allocated_bytes, peak.reserved_bytes, peak.used_bytes)),
            place_text(peak),
        ]
        for process in processes
        for peak in process.peaks
    ]  # fmt: skip
    headers = ("process", "GPU", "steps", "allocated", "reserved", "device total", "peak")
    return doc.Table(headers, rows, first=len(rows))


MAX_WAYS = 3


def explanation_text(explanation: Explanation) -> str:
    """What would help, where that is known; what was seen in the log or snapshot, what it means and
    what to do; then what was alive."""
    relief = relief_parts(explanation.relief) if explanation.relief is not None else []
    differences: list[doc.Part] = [doc.Text("\n".join(explanation.differs))]
    expected = explanation.expected
    total = explanation.seen.get("total_bytes") or (expected and expected.budget_bytes)
    # Where the setting fits by prediction, a change of it is not what helps first.
    fits = bool(expected and total and expected.device_total_bytes <= total)
    parts, last = (differences, relief) if fits else (relief, differences)
    if not explanation.findings and explanation.kind == "log":
        parts.append(doc.Text(sentence("nothing recognised", source=explanation.source)))
    parts += [doc.Text("\n".join(_finding_lines(finding))) for finding in explanation.findings]
    rows: list[list[doc.Cell]] = [
        [name, doc.bytes_cell(explanation.seen[key])]
        for key, name in TEXTS["rows"].items()
        if key in explanation.seen
    ]
    parts.append(_whole_table(("", ""), rows))
    if explanation.snapshot is not None:
        parts.append(doc.Text(sentence("free blocks", explanation.snapshot.figures)))
        parts += _failure_tables(explanation.snapshot, expected.breakdown if expected else {})
    return parts_text([*parts, *last, doc.Text("\n".join(explanation.notes))])


def _whole_table(headers: Sequence[str], rows: list[list[doc.Cell]]) -> doc.Table:
    """A table with all of its rows on the first screen: there is no other place to see more."""
    return doc.Table(headers, rows, first=len(rows))


def _finding_lines(finding: Diagnosis) -> Iterator[str]:
    title = f"possibly {finding.kind}" if finding.to_tell else finding.kind
    or_more = " and more" if finding.count >= MANY else ""
    times = f" ({finding.count:,} times{or_more})" if finding.count > 1 else ""
    ranks = f", rank {', '.join(map(str, finding.ranks))}" if finding.ranks else ""
    yield f"{title[0].upper()}{title[1:]}{times}{ranks}: {finding.meaning}"
    yield from (f"  line {number}: {text}" for number, text in finding.evidence)
    yield from (f"- {text}" for text in finding.ways_out)
    if finding.to_tell:
        yield f"- To tell: {finding.to_tell}"


def _failure_tables(reading: SnapshotReading, predicted: Mapping[str, int]) -> Iterator[doc.Part]:
    rows: list[list[doc.Cell]] = []
    for category, num_bytes in reading.categories.items():
        predicted_bytes = sum(predicted.get(key, 0) for key in TEXTS["breakdown"].get(category, ()))
        rows.append([category, doc.bytes_cell(num_bytes), doc.bytes_cell(predicted_bytes or None)])
    yield _whole_table(("alive", "seen", "predicted at the peak"), rows).compact()
    if reading.categories.keys() != {NO_STACK}:
        places: list[list[doc.Cell]] = [
            [doc.bytes_cell(g.num_bytes), doc.count_cell(g.count), g.category, g.where]
            for g in reading.groups
        ]
        yield _whole_table(("bytes", "blocks", "what", "where"), places)


def relief_parts(relief: Relief) -> list[doc.Part]:
    """How much memory must become free, and the ways that are predicted to free it."""
    goal, advice = f"{format_bytes(relief.needed_bytes)} must become free", relief.advice
    if advice is None or relief.why_none:
        return [doc.Text(f"{goal}: {relief.why_none}.")]
    total = format_bytes(advice.as_asked.estimate.device_total_bytes)
    rate = f"{format_rate(advice.as_asked.images_per_second)} {advice.unit}/s on {advice.rates_of}"
    rate += "" if advice.gpu else " (name yours with --gpu)"
    text = f"{goal}. As it is, it should need {total} and do {rate}; by prediction these free it"
    table = ways_table(advice, text)
    first = doc.Copyable(advice.ways[0].command, "The first")
    return [replace(table, rows=table.rows[:MAX_WAYS]), first]
