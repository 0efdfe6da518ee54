"""An explanation as a person reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from planner.core.failures import SAID, sentence
from planner.core.units import format_bytes, format_seconds
from planner.report.settings import in_words
from planner.report.terminal import table_text
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
    return "\n\n".join(part for part in _parts(found) if part)


def _parts(found: Explanation) -> Iterator[str]:
    if not found.findings and found.kind == "log":
        yield sentence("nothing recognised", source=found.source)
    if found.run:
        yield _run(found)
    yield from (_finding(finding, found.kind == "snapshot") for finding in found.findings)
    seen = ((name, found.seen.get(key)) for key, name in SAID["rows"].items())
    rows = [[name, format_bytes(num_bytes)] for name, num_bytes in seen if num_bytes is not None]
    if rows:
        yield table_text(rows, align="lr")
    if found.snapshot is not None:
        yield _alive(found.snapshot, found)
    yield "\n".join(found.differs)
    if found.relief is not None:
        yield relief_text(found.relief)
    yield "\n".join(found.notes)


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


def _alive(reading: SnapshotReading, found: Explanation) -> str:
    breakdown = found.expected.breakdown if found.expected else {}
    rows = []
    for category, num_bytes in reading.categories.items():
        keys = _PREDICTED.get(category, ())
        said = sum(breakdown.get(key, 0) for key in keys) if breakdown and keys else None
        rows.append([category, format_bytes(num_bytes), format_bytes(said) if said else ""])
    headers = ["alive", "seen", *(["predicted at the peak"] if breakdown else [])]
    table = table_text([row[: len(headers)] for row in rows], headers, "lr")
    places = table_text(
        [[format_bytes(g.num_bytes), str(g.count), g.category, g.where] for g in reading.groups],
        ["bytes", "blocks", "what", "where"],
        "rrl",
    )
    counts = {"num_free_blocks": reading.num_free_blocks, "num_segments": reading.num_segments}
    sizes = {key: size for key, size in reading.to_json().items() if key not in counts}
    free = sentence("free blocks", sizes, **counts)
    return "\n\n".join(
        [free, *([table] if rows else []), *([places] if reading.has_stacks else [])]
    )


def relief_text(relief: Relief) -> str:
    need = f"{format_bytes(relief.needed_bytes)} must become free"
    if not relief.levers:
        return f"{need}: {relief.why_none}."
    first, *others = (lever.changes.items() for lever in relief.levers)
    shared = {k: v for k, v in first if others and all((k, v) in other for other in others)}
    rows = [
        [
            in_words({k: v for k, v in lever.changes.items() if k not in shared}) or "nothing else",
            format_bytes(lever.freed_bytes),
            f"{lever.images_per_second:.3g}",
            ", ".join(lever.effects) or "nothing",
        ]
        for lever in relief.levers
    ]
    now = relief.images_per_second
    table = table_text(rows, ["setting", "frees", "images/s", "affects"], "lrrl")
    as_it_is = f" (as it is: {now:.3g})" if now else ""
    all_with = f", all with {in_words(shared)}" if shared else ""
    return (
        f"{need}. By prediction these free it{all_with};\n"
        f"rates are predicted for {relief.rated}{as_it_is}:\n{table}\n"
        f"The first: {relief.levers[0].command}"
    )
