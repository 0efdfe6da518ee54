"""An explanation as a person reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from planner.core.failures import SAID, sentence
from planner.core.files import to_json
from planner.core.units import format_bytes, format_seconds
from planner.report.page import contents as doc
from planner.report.settings import in_words
from planner.report.text import parts_text
from planner.watching.explaining.explanation import Explanation
from planner.watching.explaining.log_reading import MANY, MAX_SHOWN, Finding
from planner.watching.explaining.relief import Relief
from planner.watching.explaining.snapshot_reading import SnapshotReading

# What a snapshot calls a kind of block -> the rows of an estimate's breakdown that it stands for.
_PREDICTED = {
    "parameters and buffers": ("parameters", "buffers"),
    "optimizer state": ("optimizer_state",),
    "forward: activations": ("activations",),
}


def explanation_text(found: Explanation) -> str:
    return parts_text(explanation_answer(found))


def explanation_answer(found: Explanation) -> list[doc.Part]:
    """What was seen, what it means and what to do; then what was alive, and what would help."""
    parts: list[doc.Part] = []
    if not found.findings and found.kind == "log":
        parts.append(doc.Text(sentence("nothing recognised", source=found.source)))
    if found.run:
        parts.append(doc.Text(_run(found)))
    parts += [doc.Text(_finding(finding, found.kind == "snapshot")) for finding in found.findings]
    seen = ((name, found.seen.get(key)) for key, name in SAID["rows"].items())
    rows: list[list[doc.Cell]] = [
        [name, doc.bytes_cell(num_bytes)] for name, num_bytes in seen if num_bytes is not None
    ]
    parts += [doc.Table(("", ""), rows, first=len(rows))]
    if found.snapshot is not None:
        parts += _alive(found.snapshot, found)
    parts.append(doc.Text("\n".join(found.differs)))
    parts += relief_parts(found.relief) if found.relief is not None else []
    return [*parts, doc.Text("\n".join(found.notes))]


def _run(found: Explanation) -> str:
    start, end = found.run.get("start", {}), found.run.get("end", {})
    interval, plan = found.run.get("interval", {}), start.get("plan") or {}
    device = start.get("device")
    name = device.get("name", "a device") if isinstance(device, dict) else "a device"
    status = str(end.get("status", "no last line"))[:MAX_SHOWN]
    seconds = format_seconds(end.get("seconds") or interval.get("seconds") or 0.0)
    lines = [
        f"{name!s:.{MAX_SHOWN}}, begun {start.get('date', '?')!s:.{MAX_SHOWN}}:",
        f"- {end.get('step', interval.get('step', 0))} steps in {seconds}; {status}",
    ]
    rates: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("images_per_second", lambda rate: f"{rate:.4g} images/s"),
        ("wait_share", lambda share: f"{share:.0%} of the time waiting"),
        ("peak_allocated_bytes", lambda size: f"peak allocated {format_bytes(size)}"),
        ("peak_reserved_bytes", lambda size: f"peak reserved {format_bytes(size)}"),
    )
    for key, told in rates:
        values = end if key.endswith("_bytes") else end.get("steady") or interval
        if key in values:
            planned = f" (plan: {told(plan[key])})" if plan.get(key) else ""
            lines.append(f"- {told(values[key])}{planned}")
    if not found.findings:
        lines.append("- nothing was out of the ordinary")
    return "\n".join(lines)


def _finding(finding: Finding, is_plain: bool) -> str:
    title = f"possibly {finding.kind}" if finding.apart else finding.kind
    title = title[0].upper() + title[1:]
    more = " and more" if finding.count >= MANY else ""
    times = f" ({finding.count:,} times{more})" if finding.count > 1 else ""
    ranks = f", rank {', '.join(map(str, finding.ranks))}" if finding.ranks else ""
    lines = [f"{title}{times}{ranks}: {finding.means}"]
    if not is_plain:
        lines += [f"  line {number}: {text}" for number, text in finding.evidence]
    lines += [f"- {text}" for text in finding.todo]
    if finding.apart:
        lines.append(f"- To tell: {finding.apart}")
    return "\n".join(lines)


def _alive(reading: SnapshotReading, found: Explanation) -> Iterator[doc.Part]:
    counts = {"num_free_blocks": reading.num_free_blocks, "num_segments": reading.num_segments}
    sizes = {key: size for key, size in to_json(reading).items() if key not in counts}
    yield doc.Text(sentence("free blocks", sizes, **counts))
    breakdown = found.expected.breakdown if found.expected else {}
    rows: list[list[doc.Cell]] = []
    for category, num_bytes in reading.categories.items():
        said = sum(breakdown.get(key, 0) for key in _PREDICTED.get(category, ()))
        rows.append(
            [
                category,
                doc.bytes_cell(num_bytes),
                doc.Number(said, format_bytes(said) if said else ""),
            ]
        )
    headers = ["alive", "seen", *(["predicted at the peak"] if breakdown else [])]
    yield doc.Table(headers, [row[: len(headers)] for row in rows], first=len(rows))
    if reading.has_stacks:
        places: list[list[doc.Cell]] = [
            [doc.bytes_cell(g.num_bytes), doc.count_cell(g.count), g.category, g.where]
            for g in reading.groups
        ]
        yield doc.Table(["bytes", "blocks", "what", "where"], places, first=len(places))


def relief_parts(relief: Relief) -> list[doc.Part]:
    need = f"{format_bytes(relief.needed_bytes)} must become free"
    if not relief.levers:
        return [doc.Text(f"{need}: {relief.why_none}.")]
    first, *others = (lever.changes.items() for lever in relief.levers)
    shared = {k: v for k, v in first if others and all((k, v) in other for other in others)}
    rows: list[list[doc.Cell]] = [
        [
            in_words({k: v for k, v in lever.changes.items() if k not in shared}) or "nothing else",
            doc.bytes_cell(lever.freed_bytes),
            doc.Number(lever.images_per_second, f"{lever.images_per_second:.3g}"),
            ", ".join(lever.effects) or "nothing",
        ]
        for lever in relief.levers
    ]
    now = relief.images_per_second
    as_it_is = f" (as it is: {now:.3g})" if now else ""
    all_with = f", all with {in_words(shared)}" if shared else ""
    said = (
        f"{need}. By prediction these free it{all_with};\n"
        f"rates are predicted for {relief.rated}{as_it_is}:"
    )
    headers = ["setting", "frees", "images/s", "affects"]
    return [
        doc.Table(headers, rows, said.replace("\n", " "), first=len(rows)),
        doc.Copyable(relief.levers[0].command, "The first"),
    ]
