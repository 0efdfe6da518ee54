"""The page of a program that ran on emulated cards: what it needed, and what was alive then."""

from __future__ import annotations

import shlex

from planner.core.units import format_bytes
from planner.report.emulation import (
    ALIVE,
    CAVEAT,
    PROCESSES,
    SELECTS,
    alive_rows,
    answer,
    grew,
    known_levers,
    process_rows,
    title_of,
)
from planner.report.page.contents import (
    Copyable,
    Facts,
    Group,
    Page,
    Part,
    Section,
    Table,
    Text,
    Verdict,
    VerdictKind,
)
from planner.watching.emulating.reading import EmulatedRun

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
        found = [Table(ALIVE, alive_rows(run.out_of_memory.groups))]
        sections.append(Section("alive", "Alive when it ran out of memory", found))
    ran = [process for process in run.processes if process.peaks]
    if len(ran) > 1:
        sections.append(Section("processes", "Each process", [Table(PROCESSES, process_rows(ran))]))
    for process in ran:
        named = f"{title_of(process)[0].upper()}{title_of(process)[1:]}"
        shown: list[Part] = []
        if process.fullest is not None and process.fullest.groups:
            shown.append(Table(ALIVE, alive_rows(process.fullest.groups)))
        if process.growth is not None:
            shown += [
                Text(grew(process, process.growth)),
                Table(ALIVE, alive_rows(process.growth.groups)),
            ]
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
