"""An explanation as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.core.failures import SAID, sentence
from planner.core.units import format_bytes, format_rate, format_seconds
from planner.report.advice import ways_table
from planner.report.page import contents as doc
from planner.report.text import parts_text
from planner.watching.explaining.explanation import Explanation, Relief
from planner.watching.explaining.log_reading import MANY, MAX_SHOWN, Finding
from planner.watching.explaining.snapshot_reading import NO_STACK, SnapshotReading

MAX_WAYS = 3


def explanation_text(found: Explanation) -> str:
    return parts_text(explanation_answer(found))


def explanation_answer(found: Explanation) -> list[doc.Part]:
    """What would help, where that is known; what was seen, what it means and what to do; then what
    was alive."""
    relief = relief_parts(found.relief) if found.relief is not None else []
    differs: list[doc.Part] = [doc.Text("\n".join(found.differs))]
    parts, last = (differs, relief) if _is_elsewhere(found) else (relief, differs)
    if not found.findings and found.kind == "log":
        parts.append(doc.Text(sentence("nothing recognised", source=found.source)))
    if found.run:
        calm = [] if found.findings else ["- nothing was out of the ordinary"]
        parts.append(doc.Text("\n".join([*_run(found.run), *calm])))
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
    return [*parts, *last, doc.Text("\n".join(found.notes))]


def _is_elsewhere(found: Explanation) -> bool:
    """Whether the setting fits by prediction, so that no change of it is what helps first."""
    expected = found.expected
    total = found.seen.get("total_bytes") or (expected and expected.budget_bytes)
    return bool(expected and total and expected.device_total_bytes <= total)


def _table(headers: Sequence[str], rows: list[list[doc.Cell]], caption: str = "") -> doc.Table:
    """All of it: there is no other place to see more."""
    return doc.Table(headers, rows, caption, first=len(rows))


def _run(run: Mapping[str, Any]) -> Iterator[str]:
    start, interval, end = (run.get(kind, {}) for kind in ("start", "interval", "end"))
    plan = start.get("plan", {})
    figures = {**interval, **end.get("steady", {}), **end}
    name, date = start.get("device", {}).get("name", "a device"), start.get("date", "?")
    yield f"{name!s:.{MAX_SHOWN}}, begun {date!s:.{MAX_SHOWN}}:"
    seconds = format_seconds(figures.get("seconds", 0.0))
    status = end.get("status", "no last line")
    yield f"- {figures.get('step', 0)} steps in {seconds}; {status!s:.{MAX_SHOWN}}"
    for key, told in SAID["run"].items():
        said = [told.format(format_bytes(of[key]) if key.endswith("_bytes") else of[key])
                for of in (figures, plan) if key in of]  # fmt: skip
        if key in figures:
            yield f"- {said[0]}{f' (plan: {said[1]})' if plan.get(key) else ''}"


def _finding(finding: Finding) -> Iterator[str]:
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
