"""The page's sections of the environment: device, software, what disturbed the probes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from planner.core.schema import DeviceInfo, MeasurementRecord
from planner.core.schema.record import noteworthy_bytes
from planner.core.units import format_bytes
from planner.report.page.contents import Facts, Folded, Number, Part, Section, Table, Text
from planner.report.settings import describe_setting
from search.loop.study.mixture import describe_mixture
from search.probe.evidence import is_disturbed
from search.report.rerun import search_again
from search.report.run import Run
from search.report.wording import count, flags_text, short

MOST_DISTURBED = 200  # rows; the table of probes has every flag


def environment(run: Run) -> list[Section]:
    """Where the probes ran; none where no step was probed."""
    if not run.records:
        return []
    parts: list[Part] = []
    mixture = describe_mixture(run.records)
    if mixture:
        parts.append(Text(mixture, "warning"))
    for device in _devices(run):
        parts.append(Facts(_facts(run, device)))
    parts += [*_disturbed(run.records), *search_again(run)]
    return [Section("environment", "Environment", parts)]


def _devices(run: Run) -> list[DeviceInfo]:
    """One of each kind: what was tuned for first."""
    found: list[DeviceInfo] = [run.found.device] if run.found else []
    for record in run.records:
        if not any(record.device.is_like(other) for other in found):
            found.append(record.device)
    return found


def _facts(run: Run, device: DeviceInfo) -> list[tuple[str, str]]:
    records = [r for r in run.records if r.device.is_like(device)]
    facts = [("Device", device.title), ("Memory", format_bytes(device.total_bytes))]
    if device.memory_cap_bytes is not None:
        cap = f"{format_bytes(device.memory_cap_bytes)}: a smaller device is emulated"
        facts.append(("Capped at", cap))
    if run.budget_bytes is not None:
        facts.append(("A setting may take", format_bytes(run.budget_bytes)))
    if device.capability is not None:
        facts.append(("Compute capability", ".".join(map(str, device.capability))))
    facts += [("Driver", device.driver)] if device.driver else []
    facts += _world(records)
    versions = records[-1].versions if records else {}
    said = [f"{name} {version}" for name, version in sorted(versions.items())]
    facts += [("Software", ", ".join(said))] if said else []
    others = _others(records)
    return [*facts, ("Held by others", others)] if others else facts


def _world(records: Sequence[MeasurementRecord]) -> list[tuple[str, str]]:
    world = next((r.world for r in records if r.world is not None), None)
    if world is None or world.world_size == 1:
        return []
    nodes = f" on {world.nodes} machines" if world.nodes > 1 else ""
    nccl = f" {world.nccl}" if world.nccl else ""
    links = f"; {', '.join(world.links)}" if world.links else ""
    return [("Ranks", f"{world.world_size}{nodes} over {world.backend}{nccl}{links}")]


def _others(records: Sequence[MeasurementRecord]) -> str:
    """Memory of the device that was not free when probes began, and what was taken meanwhile."""
    held = [r.device.total_bytes - r.free_bytes for r in records if r.free_bytes is not None]
    if not held:
        return ""
    said = (
        f"{format_bytes(int(median(held)))} when a probe began (median; at most "
        f"{format_bytes(max(held))})"
    )
    taken = [
        n for r in records
        if (n := r.taken_bytes or 0) > noteworthy_bytes(r.device.total_bytes)
    ]  # fmt: skip
    if not taken:
        return said
    more = f"{count(len(taken), 'probe')} saw others take up to {format_bytes(max(taken))} more"
    return f"{said}; {more}"


def _disturbed(records: Sequence[MeasurementRecord]) -> list[Part]:
    """What slowed probes, and which: their rates count less."""
    held = [(n, r) for n, r in enumerate(records, start=1) if is_disturbed(r)]
    if not held:
        return [Text("Nothing disturbed the probes, as far as was read.", "note")]
    kinds = Counter(short(flag.partition(":")[0], 60) for _, r in held for flag in r.flags)
    said = ", ".join(f"{flag} ({number})" for flag, number in kinds.most_common(5))
    rows = [
        (Number(n, str(n)), describe_setting(r.setting, r.model), flags_text(r.flags))
        for n, r in held[:MOST_DISTURBED]
    ]
    table = Table(("probe", "setting", "what"), rows)
    text = f"{count(len(held), 'probe was', 'probes were')} disturbed: {said}."
    return [Text(text), Folded("Which", [table])]
