"""What the search expected of its probes, against what they found."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.schema import MeasurementRecord
from planner.core.units import GIB
from planner.report.page.contents import Part, Section, Tabs, Text
from planner.report.settings import describe_setting
from search.report.against import Point, Words, can_be_drawn, coverage, diagonal
from search.report.run import Run

TITLE = "Expected against found"


def expected_sections(run: Run, key: str) -> list[Section]:
    """The section; none where nothing was expected of any probe, or nothing measured."""
    parts = _parts(run.records, run.unit, key)
    return [Section("expected", TITLE, parts)] if parts else []


def _parts(records: Sequence[MeasurementRecord], unit: str, key: str) -> list[Part]:
    """Of rate and of memory how many were found where they were expected, and a chart."""
    tabs: list[tuple[str, list[Part]]] = []
    for of, words in (
        ("rate", Words("expected", "rate", f"{unit}/s")),
        ("memory", Words("expected", "memory", "GiB")),
    ):
        numbered = enumerate(records, start=1)
        points = [point for n, record in numbered if (point := _point(n, record, of)) is not None]
        if points:
            chart = diagonal(f"{key}-expected-{of}", points, words)
            tabs.append((of.capitalize(), [Text(coverage(points, words)), chart]))
    return [Tabs(f"{key}-expected", tabs)] if tabs else []


def _point(number: int, record: MeasurementRecord, of: str) -> Point | None:
    """None where it was not measured, or nothing was expected of it."""
    expected = record.expected
    if expected is None or record.status != "measured":
        return None
    figures, found, scale = expected.images_per_second, record.images_per_second, 1
    if of == "memory":
        figures, found, scale = expected.used_bytes, record.used_bytes, GIB
    if figures is None or not found or not can_be_drawn(*figures, found):
        return None
    low, middle, high = (figure / scale for figure in figures)
    return Point(
        number, describe_setting(record.setting, record.model), expected.phase, middle,
        found / scale, low, high,
    )  # fmt: skip
