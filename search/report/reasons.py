"""The page's section of reasons: the runners-up, what to know, and what was not worth a probe."""

from __future__ import annotations

from collections.abc import Sequence

from planner.page.contents import Folded, Number, Part, Section, Table, Text
from planner.report.settings import describe_setting
from planner.schema import MeasurementRecord
from planner.schema.result import Recommendation
from search.report.run import Run
from search.report.wording import (
    bytes_cell,
    bytes_text,
    count,
    images_of,
    interval_of,
    interval_text,
    rate_cell,
    seconds_cell,
)


def reasons(run: Run) -> list[Section]:
    """Why this setting: none where the search recommends nothing yet."""
    found = run.found
    if found is None:
        return []
    parts: list[Part] = [*_runners_up(run, found), *map(Text, found.notes), *_ruled_out(found)]
    return [Section("reasons", "Why this setting", parts)] if parts else []


def _runners_up(run: Run, found: Recommendation) -> list[Part]:
    if found.evidence is None:
        return []
    ranked = [(str(n), r) for n, r in enumerate((found.evidence, *found.runners_up), start=1)]
    if found.baseline is not None and all(found.baseline != r for _, r in ranked):
        ranked.append(("plain default", found.baseline))
    headers = ("", "setting", f"{run.unit}/s", "memory", "compile", "step", "interval")
    rows = [(rank, *_cells(record)) for rank, record in ranked]
    caption = "The recommended setting, the runners-up and the plain default, as measured."
    return [Table(headers, rows, caption, marked=(0,)).filled()]


def _cells(record: MeasurementRecord) -> Sequence[str | Number]:
    rate = record.images_per_second
    step = images_of(record) / rate if rate else None
    return (
        describe_setting(record.setting),
        rate_cell(rate),
        Number(record.used_bytes, bytes_text(record.used_bytes)),
        seconds_cell(record.compile_seconds),
        seconds_cell(step),
        interval_text(interval_of(record)),
    )


def _ruled_out(found: Recommendation) -> list[Part]:
    """What was not probed and why; each line stands for larger batches too."""
    if not found.ruled_out:
        return []
    rows = [
        (describe_setting(ruled.setting), bytes_cell(ruled.predicted_bytes), ruled.reason)
        for ruled in found.ruled_out
    ]
    table = Table(
        ("setting", "expected memory", "why"),
        rows,
        "Larger batches of these were not probed either.",
    )
    return [Folded(f"Not worth a probe: {count(len(rows), 'setting')}", [table])]
