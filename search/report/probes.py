"""The page's section of probes in the order they ended: a chart, where the time went, a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from planner.core.schema.world import RankRecord
from planner.core.units import format_seconds
from planner.report.page.contents import Cell, Copyable, Folded, Number, Part, Section, Table, Text
from planner.report.settings import describe_setting
from search.loop.space import setting_id
from search.report.run import Probe, Run
from search.report.statistics import history_parts
from search.report.wording import (
    MAX_MESSAGE,
    bytes_cell,
    bytes_text,
    count,
    date_text,
    end_text,
    expected_text,
    flags_text,
    interval_of,
    interval_text,
    rate_cell,
    seconds_cell,
    short,
)

# Messages that are shown whole below the table; the file of records has all.
MOST_MESSAGES, MOST_CHARACTERS = 40, 1 << 20


def probes(run: Run, key: str) -> list[Section]:
    """All probes; none where there is no search of a step."""
    held = run.probes
    if not held:
        return []
    parts: list[Part] = [Text(_said(run, held))]
    parts += history_parts(run.records, run.unit, run.budget_bytes, f"{key}-order")
    parts += [_table(run, held), *ranks_parts(held), *_messages(held)]
    return [Section("probes", "Probes in order", parts)]


def _said(run: Run, held: Sequence[Probe]) -> str:
    """How many, how they ended, in what time, and by whom."""
    ends = Counter(end_text(probe.end) for probe in held if not probe.ran)
    failed = "".join(f", {number} {end}" for end, number in ends.items())
    ran = len(held) - ends.total()
    tuners = {run.tuners[p.record.probe_id] for p in held if p.record.probe_id in run.tuners}
    by = f" {len(tuners)} tuners shared the search." if len(tuners) > 1 else ""
    return f"{count(len(held), 'probe')}: {ran} ran{failed}. {_span(run)}{by}"


def _span(run: Run) -> str:
    """What the probes took together, and when that was."""
    records = run.records
    spent = format_seconds(sum(record.probe_seconds for record in records))
    compiling = sum(record.compile_seconds or 0.0 for record in records)
    wasted = sum(r.probe_seconds for r in records if r.status != "measured")
    dates = sorted(date_text(record.date) for record in records)  # ISO 8601 sorts as text
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    of_it = [f"{format_seconds(compiling)} of compiling"] if compiling else []
    of_it += [f"{format_seconds(wasted)} of probes that did not end well"] if wasted else []
    return f"Together they took {spent} ({when} UTC){': ' if of_it else ''}{', '.join(of_it)}."


def _table(run: Run, held: Sequence[Probe]) -> Table:
    tuners = len({run.tuners.get(p.record.probe_id) for p in held}) > 1
    headers = [
        "probe", "setting", f"{run.unit}/s", "memory",
        "ended", "interval", "expected", "compile", "took", "date",
        "flags",
        *(["tuner"] * tuners),
    ]  # fmt: skip
    rows = []
    for probe in held:
        record = probe.record
        row: list[Cell] = [Number(probe.number, str(probe.number))]
        row += _found(run, probe)
        row += [run.tuners.get(record.probe_id, "-")] if tuners else []
        rows.append(row)
    wanted = setting_id(run.found.setting) if run.found and run.found.setting else ""
    marked = [i for i, p in enumerate(held) if wanted and setting_id(p.record.setting) == wanted]
    said = "Every probe. Those of the recommended setting are set apart." if marked else ""
    return Table(headers, rows, said or "Every probe.", marked).filled()


def _found(run: Run, probe: Probe) -> list[Cell]:
    record = probe.record
    return [
        describe_setting(record.setting, record.model),
        rate_cell(record.images_per_second),
        Number(record.used_bytes, bytes_text(record.used_bytes)),
        ended_text(probe),
        interval_text(interval_of(record)) or "-",
        expected_text(record, run.unit),
        seconds_cell(record.compile_seconds),
        seconds_cell(record.probe_seconds),
        date_text(record.date),
        flags_text(record.flags),
    ]


def ended_text(probe: Probe) -> str:
    """How a probe ended, where, and why: `out of memory in backward: …`."""
    said = end_text(probe.end)
    if probe.end != "measured" and probe.record.phase:
        said += f" in {short(probe.record.phase, 40)}"
    return f"{said}: {short(probe.record.message)}" if probe.record.message else said


def _messages(held: Sequence[Probe]) -> list[Part]:
    """Messages that the table shortens, whole: each once."""
    numbers: dict[str, list[int]] = {}
    for probe in held:
        message = probe.record.message
        if len(message) > MAX_MESSAGE or "\n" in message.strip():
            numbers.setdefault(message, []).append(probe.number)
    parts: list[Part] = []
    left = MOST_CHARACTERS
    for message, of in numbers.items():
        if len(parts) == MOST_MESSAGES or len(message) > left:
            break
        left -= len(message)
        parts.append(Copyable(message, _of_probes(of)))
    more = len(numbers) - len(parts)
    if more:
        parts.append(Text(f"{count(more, 'more message')}: see the records.", "note"))
    return [Folded(f"Whole messages: {len(numbers)}", parts)] if parts else []


def _of_probes(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:8]))
    return f"probe {listed}" + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


HEADERS = (
    "probe", "rank", "device", "step", "forward", "allocated", "reserved", "of the device",
)  # fmt: skip


def ranks_parts(held: Sequence[Probe]) -> list[Part]:
    """A row for each rank of each probe; none where no probe had several."""
    rows = [_rank_row(probe.number, rank) for probe in held for rank in probe.record.ranks]
    said = (
        "Of each rank the median of its own steps and its own peaks. Ranks wait for each other in "
        "every step: a slow one is seen in the first forward, in which it waits for nobody."
    )
    return [Folded("Each rank by itself", [Table(HEADERS, rows, said).filled()])] if rows else []


def _rank_row(number: int, rank: RankRecord) -> list[Cell]:
    sizes = (rank.peak_allocated_bytes, rank.peak_reserved_bytes, rank.device_bytes)
    return [
        Number(number, str(number)),
        Number(rank.rank, str(rank.rank)),
        rank.device,
        seconds_cell(rank.step_seconds),
        seconds_cell(rank.forward_seconds),
        *map(bytes_cell, sizes),
    ]
