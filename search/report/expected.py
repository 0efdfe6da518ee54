"""What the search expected of its probes, against what they found: whether it learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.page.contents import Cell, Number, Part, Section, Table, Tabs, Text
from planner.report.settings import describe_setting
from planner.schema import MeasurementRecord
from planner.schema.expected import Expected, Range
from planner.schema.loading import LoaderRecord, LoaderSetting
from planner.units import GIB, MIB
from search.report.against import (
    Point,
    Words,
    diagonal,
    factor_text,
    in_order,
    off_text,
    typical_ratio,
)
from search.report.estimated import ESTIMATE, estimated_expectations
from search.report.parted import section_of
from search.report.run import Run
from search.report.validation import is_validation, validation_sections
from search.report.wording import count, count_cell, share_cell

TITLE = "Expected against found"
NUM_SURPRISES = 8  # that the table lists
SURPRISING = 1.05  # less than that is not worth a line
# Probes that say whether a search learns: fewer make no first and no last half.
FEWEST_TO_LEARN = 6
CLEARLY = 0.8  # of the other half's error, by our judgement: nearer than that is about the same
# Chances to fit, from the least to the most, as a table of them counts.
CHANCES = ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 1.01))


class Foretold(NamedTuple):
    """A probe with what was expected of it. `number` counts all probes from 1."""

    number: int
    record: MeasurementRecord | LoaderRecord
    expected: Expected

    @property
    def title(self) -> str:
        setting = self.record.setting
        return setting.title if isinstance(setting, LoaderSetting) else describe_setting(setting)


@dataclass(frozen=True)
class Quantity:
    """A figure of probes: what it is called, and in which words; whether what was expected rests on
    earlier probes."""

    key: str
    name: str
    words: Words
    points: tuple[Point, ...]
    learns: bool


def expected_sections(run: Run, key: str) -> list[Section]:
    """The section; none where nothing was expected of any probe, or nothing measured. Of records
    that no search asked for: predicted against measured."""
    validated = validation_sections(run, key) if is_validation(run) else []
    return validated or section_of(run, key, "expected", TITLE, _parts)


def expected_of_loaders(run: Run, key: str) -> list[Section]:
    """The same of the probes of loaders."""
    probes = _kept(run.loaders.records) if run.loaders is not None else []
    parts = _compared(probes, "images/s", f"{key}-loader")
    title = f"Loader: {TITLE[0].lower()}{TITLE[1:]}" if run.records else TITLE
    return [Section("loader-expected", title, parts)] if parts else []


def _parts(run: Run, key: str) -> list[Part]:
    probes, note = foretold_probes(run.records)
    parts = _compared(probes, f"{run.unit}/s", key)
    return [Text(note, "note"), *parts] if parts and note else parts


def _compared(probes: Sequence[Foretold], per_second: str, key: str) -> list[Part]:
    found = [q for q in _quantities(probes, per_second) if q.points]
    if not found:
        return []
    tabs = [(q.name, _parts_of(q, key)) for q in found]
    parts = tabs[0][1] if len(tabs) == 1 else [Tabs(f"{key}-expected", tabs)]
    return [*parts, *_chances(probes)]


def foretold_probes(records: Sequence[MeasurementRecord]) -> tuple[list[Foretold], str]:
    """Every probe of which something was expected, and what is to be said of that. Where the
    records keep nothing (they are of before records did), the estimate stands in."""
    kept = _kept(records)
    if kept:
        others = [p for p in kept if p.expected.basis == "prior"]
        note = ""
        if len(others) == len(kept) > 1:
            note = (
                "The strategy of this search expects nothing by itself: the estimate before any "
                "probe is compared, so it does not learn from one probe to the next."
            )
        return kept, note
    estimated, basis = estimated_expectations(records)
    if not estimated:
        return [], ""
    note = (
        "These records do not say what the search expected. Compared is what the planner estimates "
        f"now, before any probe: {basis}."
    )
    pairs = zip(records, estimated, strict=True)
    probes = [Foretold(n, r, e) for n, (r, e) in enumerate(pairs, start=1) if e is not None]
    return probes, note


def _kept(records: Sequence[MeasurementRecord | LoaderRecord]) -> list[Foretold]:
    return [
        Foretold(n, r, r.expected) for n, r in enumerate(records, start=1) if r.expected is not None
    ]


def _quantities(probes: Sequence[Foretold], per_second: str) -> list[Quantity]:
    ran = [p for p in probes if p.record.status == "measured"]
    most = max((p.record.used_bytes or 0 for p in probes), default=0)
    scale, unit = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    rates = [_point(p, p.expected.images_per_second, p.record.images_per_second) for p in ran]
    sizes = [_point(p, p.expected.used_bytes, p.record.used_bytes, scale) for p in ran]
    learns = any(p.expected.basis == "probes" for p in probes)
    return [
        Quantity("rate", "Rate", Words("expected", "rate", per_second), _known(rates), learns),
        Quantity("memory", "Memory", Words("expected", "memory", unit), _known(sizes), learns),
    ]


def _known(points: Sequence[Point | None]) -> tuple[Point, ...]:
    return tuple(point for point in points if point is not None)


def _point(
    probe: Foretold, figures: Range | None, found: float | None, scale: float = 1
) -> Point | None:
    if figures is None or not found or min(figures) <= 0:
        return None
    low, middle, high = (figure / scale for figure in figures)
    phase = probe.expected.phase
    # The estimate that stands in for a search's own expectation is compared by its middle only.
    between = (None, None) if phase == ESTIMATE else (low, high)
    return Point(probe.number, probe.title, phase, middle, found / scale, *between)


def _parts_of(quantity: Quantity, key: str) -> list[Part]:
    points, words = quantity.points, quantity.words
    parts: list[Part] = [
        Text(_coverage(points, words)),
        diagonal(f"{key}-expected-{quantity.key}", points, words),
    ]
    if len(points) > 1:
        parts += [
            *([Text(_learning(points))] if quantity.learns else []),
            in_order(f"{key}-expected-{quantity.key}-learned", points, words),
        ]
    return [*parts, *_surprises(points, words)]


def _coverage(points: Sequence[Point], words: Words) -> str:
    within = sum(bool(p.is_within) for p in points)
    off = f"Half of them were off by no more than {factor_text(typical_ratio(points))}."
    if all(p.is_within is None for p in points):
        return f"{count(len(points), 'probe was', 'probes were')} measured. {off}"
    if len(points) == 1:
        where = "within" if within else "outside"
        return (
            f"One probe was measured: {off_text(points[0].ratio, 'expected')}, {where} the "
            "interval that should hold 95%."
        )
    return (
        f"{within:,} of {len(points):,} probes ({within / len(points):.0%}) found a {words.of} "
        f"within the interval that should hold 95% of them. {off}"
    )


def _learning(points: Sequence[Point]) -> str:
    """Whether later probes are nearer to what was expected."""
    if len(points) < FEWEST_TO_LEARN:
        return "Too few probes to say whether the search learned from one to the next."
    middle = len(points) // 2
    early, late = typical_ratio(points[:middle]), typical_ratio(points[-middle:])
    said = (
        f"Of the first {middle} probes half were off by no more than {factor_text(early)}, of the "
        f"last {middle} by no more than {factor_text(late)}"
    )
    if late - 1 < CLEARLY * (early - 1):
        return f"{said}: the search learned."
    if early - 1 < CLEARLY * (late - 1):
        return f"{said}: it did not get better, as where a search leaves what it knows."
    return f"{said}: about the same."


def _surprises(points: Sequence[Point], words: Words) -> list[Part]:
    """The probes that were furthest from what was expected."""
    off = [p for p in points if max(p.ratio, 1 / p.ratio) >= SURPRISING]
    off = sorted(off, key=lambda p: -max(p.ratio, 1 / p.ratio))[:NUM_SURPRISES]
    if not off:
        return []
    rows: list[list[Cell]] = [
        [
            Number(p.number, str(p.number)), p.title,
            Number(p.foretold, f"{p.foretold:,.4g}"), Number(p.found, f"{p.found:,.4g}"),
            Number(p.ratio, off_text(p.ratio)),
        ]
        for p in off
    ]  # fmt: skip
    headers = ["Probe", "Setting", "Expected", "Found", "Difference"]
    if all(p.is_within is not None for p in off):
        headers.append("In interval")
        rows = [[*row, "yes" if p.is_within else "no"] for row, p in zip(rows, off, strict=True)]
    return [Table(headers, rows, f"The probes that surprised most, in {words.unit}.")]


def _chances(probes: Sequence[Foretold]) -> list[Part]:
    """How many fitted of those that were given a chance to."""
    judged = [
        (p.expected.fits, fitted)
        for p in probes
        if p.expected.fits is not None and (fitted := _fitted(p.record)) is not None
    ]
    if len(judged) < 2:
        return []
    rows = []
    for low, high in CHANCES:
        own = [fitted for chance, fitted in judged if low <= chance < high]
        if own:
            name = f"{low:.0%} to {min(high, 1):.0%}"
            share = sum(own) / len(own)
            rows.append([
                Number(low, name), count_cell(len(own)),
                count_cell(sum(own)), share_cell(share, ".0%"),
            ])  # fmt: skip
    headers = ["Expected chance to fit", "Probes", "Fitted", "Share"]
    return [Table(headers, rows, "The chance to fit that was expected, and how many did.")]


def _fitted(record: MeasurementRecord | LoaderRecord) -> bool | None:
    """Whether a probe stayed in what it was allowed; None where it says nothing of that."""
    if record.inconclusive or isinstance(record, LoaderRecord):  # which has no limit
        return None
    if record.status == "out_of_memory":
        return False
    if record.status != "measured" or not record.used_bytes or not record.allowed_bytes:
        return None
    return record.used_bytes <= record.allowed_bytes
