"""An explanation as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator

from planner.core.units import format_bytes, format_seconds
from planner.report.settings import in_words
from planner.report.terminal import table_text
from planner.watching.explaining.explanation import Explanation
from planner.watching.explaining.finding import MAX_SHOWN, Finding
from planner.watching.explaining.relief import Relief
from planner.watching.explaining.snapshot_reading import SnapshotReading

# What a snapshot calls a kind of block -> the rows of an estimate's breakdown that it stands for.
_PREDICTED = {
    "parameters and buffers": ("parameters", "buffers"),
    "optimizer state": ("optimizer_state",),
    "forward: activations": ("activations",),
}
_SEEN = {
    "total_bytes": "the device has", "free_bytes": "free on the device",
    "process_bytes": "this process", "other_bytes": "other processes",
    "allocated_bytes": "allocated to tensors", "unused_bytes": "reserved, unused",
    "private_pool_bytes": "in pools of CUDA graphs", "requested_bytes": "asked for",
    "missing_bytes": "missing at least",
}  # fmt: skip


def explanation_text(found: Explanation) -> str:
    return "\n\n".join(part for part in _parts(found) if part)


def _parts(found: Explanation) -> Iterator[str]:
    if not found.findings and found.kind == "log":
        yield (
            f"Nothing in {found.source} is recognised: no out-of-memory error, no failure of the "
            "loader, NCCL, CUDA or the loss. What a process wrote to standard error, a traceback "
            "too, may be in another file."
        )
    if found.run:
        yield _run(found)
    yield from (_finding(finding, found.kind == "snapshot") for finding in found.findings)
    seen = {key: found.seen.get(key) for key in _SEEN}
    rows = [[_SEEN[key], format_bytes(num_bytes)] for key, num_bytes in seen.items()
            if num_bytes is not None and (num_bytes or key != "other_bytes")]  # fmt: skip
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
    last = end.get("steady") or found.run.get("interval", {})
    device = start.get("device")
    name = device.get("name", "a device") if isinstance(device, dict) else "a device"
    lines = [f"{name!s:.{MAX_SHOWN}}, begun {start.get('date', '?')!s:.{MAX_SHOWN}}:"]
    status = str(end.get("status", "no last line"))[:MAX_SHOWN]
    steps = end.get("step", found.run.get("interval", {}).get("step", 0))
    seconds = end.get("seconds") or found.run.get("interval", {}).get("seconds") or 0.0
    lines.append(f"- {steps} steps in {format_seconds(seconds)}; {status}")
    plan = start.get("plan") or {}
    for key, unit in (("images_per_second", "images/s"), ("wait_share", "of the time waiting")):
        if key in last:
            text = f"{last[key]:.4g} {unit}" if key != "wait_share" else f"{last[key]:.0%} {unit}"
            said = plan.get(key)
            lines.append(f"- {text}" + (f" (plan: {said:.4g})" if said else ""))
    for key in ("peak_allocated_bytes", "peak_reserved_bytes"):
        if key in end:
            said = plan.get(key)
            words = key.removesuffix("_bytes").replace("_", " ")
            lines.append(
                f"- {words} {format_bytes(end[key])}"
                + (f" (plan: {format_bytes(said)})" if said else "")
            )
    if not found.findings:
        lines.append("- nothing was out of the ordinary")
    return "\n".join(lines)


def _finding(finding: Finding, is_plain: bool) -> str:
    title = f"possibly {finding.kind}" if finding.apart else finding.kind
    title = title[0].upper() + title[1:]
    times = f" ({finding.count} times)" if finding.count > 1 else ""
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
    free = (
        f"{format_bytes(reading.free_bytes)} of {format_bytes(reading.reserved_bytes)} reserved "
        f"are free, in {reading.num_free_blocks} blocks of {reading.num_segments} segments; the "
        f"largest has {format_bytes(reading.largest_free_bytes)}."
    )
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
