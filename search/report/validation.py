"""Predicted against measured, of records that no search asked for: what `planner validate` made."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from planner.core.schema import SwinConfig
from planner.core.units import GIB, format_bytes, format_seconds
from planner.report.page.contents import Cell, Folded, Number, Part, Section, Table, Tabs, Text
from planner.report.settings import describe_setting, value_text
from search.report.against import Point, Words, can_be_drawn, diagonal
from search.report.parted import section_of
from search.report.run import Run
from search.report.statistics import axis_name, varied_axes
from search.report.wording import count_cell, share_cell
from search.tuning.validation.compare import (
    QUANTITIES,
    Comparison,
    accuracies,
    accuracy,
    compare,
    gpu_of,
    phase_accuracies,
    rank_correlation,
)

TITLE = "Predicted against measured"
TIME = "step time"
# An estimate takes some hundredths of a second: of more records these are compared, evenly spread.
MOST_COMPARED = 100


def is_validation(run: Run) -> bool:
    """Whether no search made the records: none has a limit of memory or an expectation."""
    plain = all(r.allowed_bytes is None and r.expected is None for r in run.records)
    return run.found is None and plain and bool(run.records)


def validation_sections(run: Run, key: str) -> list[Section]:
    """The section; none where an estimate exists for no record."""
    return section_of(run, key, "validation", TITLE, _parts)


def _parts(run: Run, key: str) -> list[Part]:
    able = [
        r for r in run.records
        if r.status == "measured" and isinstance(r.model, SwinConfig) and gpu_of(r) is not None
    ]  # fmt: skip
    stride = -(-len(able) // MOST_COMPARED) or 1
    compared = compare(able[::stride])
    if not compared:
        return []
    parts: list[Part] = [Text(_lead(compared))]
    if stride > 1:
        parts.append(Text(f"Of {len(able):,} records every {stride}th is compared.", "note"))
    found = [(q, _points(compared, q)) for q in QUANTITIES]
    tabs = [
        (q.capitalize(), [diagonal(f"{key}-validation-{q.replace(' ', '-')}", points, _words(q))])
        for q, points in found
        if points
    ]
    if not tabs:
        return []
    parts += [
        Tabs(f"{key}-validation", tabs),
        _summary(compared),
        *_by_axis(compared),
        *_by_phase(compared),
        Folded("Every setting", [_table(compared)]),
    ]
    return parts


def _lead(compared: Sequence[Comparison]) -> str:
    said = []
    for quantity, name in (("device", "Memory of the device"), (TIME, "Step time")):
        of = accuracy(compared, quantity)
        if of is not None:
            said.append(
                f"{name} is predicted to within {of.median:.1%} for half of {of.count} "
                f"measurements, and {of.worst:.1%} off at worst."
            )
    correlation = rank_correlation(compared)
    if correlation is not None:
        said.append(
            f"Predicted and measured step time put the settings in nearly the same order (rank "
            f"correlation {correlation:.2f})."
            if correlation >= 0.9
            else f"The rank correlation of predicted and measured step time is {correlation:.2f}."
        )
    return " ".join(said)


def _words(quantity: str) -> Words:
    unit = "ms" if quantity == TIME else "GiB"
    return Words("predicted", quantity if quantity == TIME else f"{quantity} memory", unit)


def _points(compared: Sequence[Comparison], quantity: str) -> tuple[Point, ...]:
    scale = 1e-3 if quantity == TIME else GIB
    return tuple(
        Point(
            number, describe_setting(c.record.setting, c.record.model),
            "eager" if c.record.setting.compile == "off" else "compiled",
            pair[0] / scale, pair[1] / scale,
        )
        for number, c in enumerate(compared, start=1)
        if (pair := c.figures.get(quantity)) is not None and can_be_drawn(*pair)
    )  # fmt: skip


def _summary(compared: Sequence[Comparison]) -> Table:
    """As `planner validate` prints it."""
    rows: list[list[Cell]] = [
        [kind, quantity, count_cell(of.count), share_cell(of.median), share_cell(of.worst)]
        for kind, quantity, of in accuracies(compared)
    ]
    headers = ["Steps", "Figure", "Records", "Median error", "Worst error"]
    return Table(headers, rows, "How far predictions are off, whichever way.")


def _by_axis(compared: Sequence[Comparison]) -> list[Part]:
    """For each value of each axis which way predictions are off."""
    axes = varied_axes([c.record.setting for c in compared])
    rows: list[list[Cell]] = []
    for axis in axes:
        values = list(dict.fromkeys(getattr(c.record.setting, axis) for c in compared))
        for value in values:
            own = [c for c in compared if getattr(c.record.setting, axis) == value]
            rows.append([
                axis_name(axis), value_text(value), count_cell(len(own)),
                *(_median_error(own, quantity) for quantity in QUANTITIES),
            ])  # fmt: skip
    headers = ["Axis", "Value", "Records", *(q.capitalize() for q in QUANTITIES)]
    caption = "The median error of each value: + where more is predicted than was measured."
    return [Table(headers, rows, caption)] if rows else []


def _median_error(compared: Sequence[Comparison], quantity: str) -> Number:
    errors = [e for c in compared if (e := c.error(quantity)) is not None]
    return share_cell(median(errors), "+.1%") if errors else Number(None, "-")


def _by_phase(compared: Sequence[Comparison]) -> list[Part]:
    rows: list[list[Cell]] = [
        [phase, count_cell(of.count), share_cell(of.median, ".2%"), share_cell(of.worst, ".2%")]
        for phase, of in phase_accuracies(compared)
    ]
    headers = ["Live bytes", "Records", "Median error", "Worst error"]
    return [Table(headers, rows, "Live bytes at the end of each phase.")] if rows else []


def _table(compared: Sequence[Comparison]) -> Table:
    headers = ["Setting"]
    for quantity in QUANTITIES:
        headers += [f"{quantity.capitalize()} measured", "Error"]
    rows: list[list[Cell]] = [
        [
            describe_setting(c.record.setting, c.record.model),
            *(cell for quantity in QUANTITIES for cell in _cells(c, quantity)),
        ]
        for c in compared
    ]
    caption = "Each figure as measured, and (predicted - measured) / measured."
    return Table(headers, rows, caption)


def _cells(compared: Comparison, quantity: str) -> list[Number]:
    pair, error = compared.figures.get(quantity), compared.error(quantity)
    if pair is None or error is None:
        return [Number(None, "-"), Number(None, "-")]
    measured = pair[1]
    text = format_seconds(measured) if quantity == TIME else format_bytes(int(measured))
    return [Number(measured, text), share_cell(error, "+.1%")]
