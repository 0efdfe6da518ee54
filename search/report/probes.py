"""The page's section of probes in the order they ended: a chart, where the time went, a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.page.contents import Cell, Chart, Copyable, Folded, Number, Part, Section, Table, Text
from planner.page.plotting import GREY, new_figure, plot_text
from planner.report.settings import describe_setting
from planner.units import format_seconds
from search.probe.evidence import is_feasible
from search.report.marks import (
    best_line,
    by_end,
    by_kind,
    end_mark,
    order_layout,
    points,
    precision_mark,
)
from search.report.probe import Probe
from search.report.ranks import ranks_parts
from search.report.run import Run
from search.report.spent import spent_chart
from search.report.wording import (
    MAX_MESSAGE,
    bytes_text,
    count,
    date_text,
    end_text,
    expected_text,
    flags_text,
    interval_of,
    interval_text,
    rate_cell,
    rate_text,
    seconds_cell,
    short,
)
from search.space import setting_id

# Messages that are shown whole below the table; the file of records has all.
MOST_MESSAGES, MOST_CHARACTERS = 40, 1 << 20


def probes(run: Run, key: str) -> list[Section]:
    """All probes; none where there is no search of a step."""
    held = run.probes
    if not held:
        return []
    parts: list[Part] = [Text(_said(run, held))]
    if len(run.parts) == 1:  # rates of several models have no best
        parts.append(order_chart(run, held, f"{key}-order"))
    parts += [spent_chart(run.records, f"{key}-spent"), _table(run, held)]
    parts += [*ranks_parts(held), *_messages(held)]
    return [Section("probes", "Probes in order", parts)]


def _said(run: Run, held: Sequence[Probe]) -> str:
    """How many, how they ended, in what time, and by whom."""
    ends = [f"{len(group)} {end_text(end)}" for end, group in by_end(held).items()]
    ran = sum(probe.ran for probe in held)
    failed = f", {', '.join(ends)}" if ends else ""
    tuners = {run.tuners[p.record.probe_id] for p in held if p.record.probe_id in run.tuners}
    by = f" {len(tuners)} tuners shared the search." if len(tuners) > 1 else ""
    return f"{count(len(held), 'probe')}: {ran} ran{failed}. {_span(run)}{by}"


def _span(run: Run) -> str:
    """What the probes took together, and when that was."""
    spent = format_seconds(sum(record.probe_seconds for record in run.records))
    dates = sorted(date_text(record.date) for record in run.records)  # ISO 8601 sorts as text
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"Together they took {spent} ({when} UTC)."


def order_chart(run: Run, held: Sequence[Probe], key: str) -> Chart:
    """Images/s by the number of the probe, with the fastest so far as steps."""
    within = _feasible_rates(run, held)
    traces = [best_line(within), *_expected_marks(held)]
    for precision, group in _by_precision(held).items():
        traces.append(_marks(group, **precision_mark(precision)))
    for end, group in by_end(held).items():
        traces.append(_marks(group, cliponaxis=False, **end_mark(end)))
    rates = {"title": {"text": plot_text(f"{run.unit}/s")}, "range": _range(held)}
    layout = order_layout(len(held), rates)
    described = f"{run.unit.capitalize()}/s of each probe in order. {_best_words(within)}"
    return Chart(key, new_figure(traces, **layout), described, height_px=420)


def _range(held: Sequence[Probe]) -> tuple[float, float]:
    """From a little below 0, where those without a rate stand, to above the fastest. What was
    expected may lie outside."""
    top = max((p.record.images_per_second or 0.0 for p in held), default=0.0) or 1.0
    return -0.06 * top, 1.1 * top


def _by_precision(held: Sequence[Probe]) -> dict[str, list[Probe]]:
    """Those that ran."""
    groups: dict[str, list[Probe]] = {}
    for (precision, _, _), group in by_kind([probe for probe in held if probe.ran]).items():
        groups.setdefault(precision, []).extend(group)
    return groups


def _feasible_rates(run: Run, held: Sequence[Probe]) -> list[float]:
    """The rate of each probe; 0 of those that did not run within the budget."""
    return [
        (p.record.images_per_second or 0.0) if is_feasible(p.record, run.budget_bytes) else 0.0
        for p in held
    ]


def _best_words(rates: Sequence[float]) -> str:
    best = max(rates)
    if not best:
        return "None ran within the budget."
    return f"The fastest, {rate_text(best)}, was found by probe {rates.index(best) + 1}."


def _expected_marks(held: Sequence[Probe]) -> list[dict[str, Any]]:
    """What the search expected of each, where its record says."""
    said = {
        probe.number: probe.record.expected.images_per_second[1]
        for probe in held
        if probe.record.expected and probe.record.expected.images_per_second
    }
    if not said:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "expected",
            "x": list(said),
            "y": list(said.values()),
            "marker": {"symbol": "line-ew-open", "size": 9, "color": GREY, "line": {"width": 2}},
            "hoverinfo": "skip",
        }
    ]


def _marks(group: Sequence[Probe], **more: Any) -> dict[str, Any]:
    rates = (probe.record.images_per_second or 0.0 for probe in group)
    return points((p.number for p in group), rates, (p.hover for p in group), **more)


def _table(run: Run, held: Sequence[Probe]) -> Table:
    several = len(run.parts) > 1
    tuners = len({run.tuners.get(p.record.probe_id) for p in held}) > 1
    headers = [
        "probe", *(["model", "device"] * several), "setting", f"{run.unit}/s", "memory",
        "ended", "interval", "expected", "compile", "took", "date",
        "flags",
        *(["tuner"] * tuners),
    ]  # fmt: skip
    rows = []
    for probe in held:
        record = probe.record
        row: list[Cell] = [Number(probe.number, str(probe.number))]
        row += [record.model.title, record.device.name] if several else []
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
        describe_setting(record.setting),
        rate_cell(record.images_per_second),
        Number(record.used_bytes, bytes_text(record.used_bytes)),
        ended_text(probe),
        interval_text(interval_of(record)) or "-",
        expected_text(record, run.unit).removeprefix("expected ") or "-",
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
