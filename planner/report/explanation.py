"""An explanation as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.core.failures import SAID, sentence
from planner.core.units import format_bytes, format_rate
from planner.programs.explanation import MANY, Diagnosis, Explanation, Relief
from planner.programs.snapshots import NO_STACK, SnapshotReading
from planner.report.advice import ways_table
from planner.report.page import contents as doc
from planner.report.text import parts_text

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
        parts += _alive(found.snapshot, found.expected.breakdown if found.expected else {})
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


def _alive(reading: SnapshotReading, predicted: Mapping[str, int]) -> Iterator[doc.Part]:
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
