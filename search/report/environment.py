"""The page's section of the environment: device, software, clocks, what disturbed the probes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from planner.page.contents import Chart, Facts, Folded, Number, Part, Section, Table, Text
from planner.page.plotting import BLUE, ORANGE, PURPLE, VERMILION, new_figure
from planner.report.settings import describe_setting
from planner.schema import DeviceInfo, MeasurementRecord
from planner.schema.record import noteworthy_bytes
from planner.units import format_bytes
from search.probe.evidence import is_disturbed
from search.report.again import search_again
from search.report.marks import legend_below, points, probe_axis
from search.report.run import Run
from search.report.wording import count, flags_text, hover, short
from search.study.mixture import describe_mixture

MOST_DISTURBED = 200  # rows; the table of probes has every flag


def environment(run: Run, key: str) -> list[Section]:
    """Where the probes ran; none where no step was probed."""
    if not run.records:
        return []
    parts: list[Part] = []
    mixture = describe_mixture(run.records)
    if mixture:
        parts.append(Text(mixture, "warning"))
    for device in _devices(run):
        parts.append(Facts(_facts(run, device)))
    parts += _clocks(run.records, f"{key}-clocks")
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
    facts = [("Device", device.name), ("Memory", format_bytes(device.total_bytes))]
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


_Reading = Callable[[MeasurementRecord], float | None]
# (axis, colour, what is read of a probe's clocks)
_READINGS: tuple[tuple[str, str, _Reading], ...] = (
    ("SM clock, MHz", BLUE, lambda r: r.clocks.sm_mhz if r.clocks else None),
    ("temperature, °C", ORANGE, lambda r: r.clocks.temperature_c if r.clocks else None),
    ("power, W", PURPLE, lambda r: r.clocks.power_watts if r.clocks else None),
)


def _clocks(records: Sequence[MeasurementRecord], key: str) -> list[Part]:
    """Clock, temperature and power over the probes, above one another; none where nothing was
    read."""
    read = [(name, colour, of) for name, colour, of in _READINGS
            if any(of(r) is not None for r in records)]  # fmt: skip
    if not read:
        return []
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"legend": legend_below(), "hovermode": "closest"}
    height = 1 / len(read)
    for row, (name, colour, of) in enumerate(read):
        axis = "" if row == 0 else str(row + 1)
        bottom = 1 - (row + 1) * height
        layout[f"yaxis{axis}"] = {
            "title": {"text": name},
            "domain": [bottom + 0.04, bottom + height],
        }
        traces.append(_readings(records, name, colour, f"y{axis}", of))
    traces += _throttled(records)
    last = f"y{len(read)}" if len(read) > 1 else "y"
    layout["xaxis"] = {**probe_axis(len(records)), "anchor": last}
    held_back = sum(bool(r.clocks and r.clocks.throttle_reasons) for r in records)
    said = f"Clocks while the steps were timed, of {count(len(records), 'probe')}."
    said += f" {held_back} were throttled." if held_back else " None was throttled."
    return [Chart(key, new_figure(traces, **layout), said, 130 + 120 * len(read))]


def _readings(
    records: Sequence[MeasurementRecord], name: str, colour: str, axis: str, of: _Reading
) -> dict[str, Any]:
    known = [(n, v) for n, r in enumerate(records, start=1) if (v := of(r)) is not None]
    return points(
        (n for n, _ in known),
        (v for _, v in known),
        (hover([f"probe {n}", f"{name} {v:.4g}"]) for n, v in known),
        mode="lines+markers",
        name=name,
        yaxis=axis,
        line={"color": colour, "width": 1},
        marker={"size": 5},
    )


def _throttled(records: Sequence[MeasurementRecord]) -> list[dict[str, Any]]:
    """Probes whose clock something held back, on the first axis."""
    held = [
        (n, r.clocks) for n, r in enumerate(records, start=1)
        if r.clocks is not None and r.clocks.throttle_reasons
    ]  # fmt: skip
    if not held:
        return []
    said = (
        hover([f"probe {n}", f"throttled: {', '.join(clocks.throttle_reasons)}"])
        for n, clocks in held
    )
    mark = {"symbol": "x", "size": 10, "color": VERMILION}
    heights = (clocks.sm_mhz for _, clocks in held)
    return [points((n for n, _ in held), heights, said, name="throttled", marker=mark)]


def _disturbed(records: Sequence[MeasurementRecord]) -> list[Part]:
    """What slowed probes, and which: their rates count less."""
    held = [(n, r) for n, r in enumerate(records, start=1) if is_disturbed(r)]
    if not held:
        return [Text("Nothing disturbed the probes, as far as was read.", "note")]
    kinds = Counter(short(flag.partition(":")[0], 60) for _, r in held for flag in r.flags)
    said = ", ".join(f"{flag} ({number})" for flag, number in kinds.most_common(5))
    rows = [
        (Number(n, str(n)), describe_setting(r.setting), flags_text(r.flags))
        for n, r in held[:MOST_DISTURBED]
    ]
    table = Table(("probe", "setting", "what"), rows)
    text = f"{count(len(held), 'probe was', 'probes were')} disturbed: {said}."
    return [Text(text), Folded("Which", [table])]
