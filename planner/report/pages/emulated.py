"""The page of a program that ran on emulated cards: what it needed, and what was alive then."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from planner.core.units import format_bytes
from planner.report.emulation import (
    CAVEAT,
    PROCESSES,
    SELECTS,
    answer,
    card_of,
    grew,
    known_levers,
    place_of,
    title_of,
)
from planner.report.page.contents import (
    Copyable,
    Facts,
    Group,
    Number,
    Page,
    Part,
    Section,
    Table,
    Text,
    Verdict,
    VerdictKind,
)
from planner.watching.emulating.reading import EmulatedProcess, EmulatedRun
from planner.watching.explaining.snapshot_reading import Group as Blocks

_KINDS: dict[bool | None, VerdictKind] = {True: "fits", False: "no", None: "unknown"}


def emulated_page(run: EmulatedRun, made: str = "") -> Page:
    """The answer, what was alive at each process's peak, and what grew. `made` as a `Page`'s."""
    first, *more = answer(run)
    verdict = Verdict(_KINDS[run.fits], " ".join(more[:1]))
    parts: list[Part] = [verdict, *_tiles(run), *map(Text, more[1:])]
    parts += [Text(SELECTS, "warning")] if run.selects else []
    parts += [Text(known_levers(run.relief), "note")] if run.relief else []
    command = Copyable(shlex.join(run.command), "The program")
    sections = [Section("answer", "Answer", [*parts, command, Text(CAVEAT, "note")])]
    if run.out_of_memory is not None:
        found = [_alive(run.out_of_memory.groups)]
        sections.append(Section("alive", "Alive when it ran out of memory", found))
    ran = [process for process in run.processes if process.peaks]
    if len(ran) > 1:
        sections.append(Section("processes", "Each process", [_processes(ran)]))
    for process in ran:
        named = f"{title_of(process)[0].upper()}{title_of(process)[1:]}"
        shown: list[Part] = []
        if process.fullest is not None and process.fullest.groups:
            shown.append(_alive(process.fullest.groups))
        if process.growth is not None:
            shown += [Text(grew(process, process.growth)), _alive(process.growth.groups)]
        shown += [Text(fault, "warning") for fault in process.faults]
        if shown:
            sections.append(Section(f"p{process.pid}", f"{named} at its peak", shown))
    title = f"{' '.join(run.command[:3])} on {run.gpu}"
    return Page(title, first, [Group("run", "", sections)], made)


def _tiles(run: EmulatedRun) -> list[Part]:
    peak = run.fullest.fullest if run.fullest else None
    if peak is None:
        return []
    figures = [
        ("Device total", f"{format_bytes(peak.used_bytes)} of {format_bytes(peak.total_bytes)}"),
        ("torch allocates", format_bytes(peak.allocated_bytes)),
        ("torch reserves", format_bytes(peak.reserved_bytes)),
        ("Steps", str(run.steps)),
    ]
    return [Facts(figures, "tiles")]


def _alive(groups: Sequence[Blocks]) -> Table:
    total = sum(group.num_bytes for group in groups)
    return Table(
        ("memory", "share", "tensors", "what", "asked for by"),
        [
            (
                Number(g.num_bytes, format_bytes(g.num_bytes)),
                Number(g.num_bytes, f"{g.num_bytes / total:.0%}"),
                Number(g.count, str(g.count)), g.category, g.where,
            )
            for g in groups
        ],
    )  # fmt: skip


def _processes(processes: Sequence[EmulatedProcess]) -> Table:
    return Table(
        PROCESSES,
        [
            (
                title_of(process), card_of(process, peak),
                Number(process.steps, str(process.steps)),
                *(
                    Number(size, format_bytes(size))
                    for size in (peak.allocated_bytes, peak.reserved_bytes, peak.used_bytes)
                ),
                place_of(peak),
            )
            for process in processes
            for peak in process.peaks
        ],
    )  # fmt: skip
