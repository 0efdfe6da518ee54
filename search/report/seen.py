"""The page's section of what `planner validate` saw of a device beside its measurements."""

from __future__ import annotations

from planner.page.contents import Cell, Section, Table
from planner.schema.observation import ObservationRecord
from search.report.run import Run
from search.report.wording import date_text, seconds_cell, short


def seen(run: Run) -> list[Section]:
    """A row for each observation; none where nothing was looked at."""
    if not run.observations:
        return []
    headers = ("what", "model", "ended", "seen", "took", "date")
    rows = [_row(found) for found in run.observations]
    return [Section("seen", "Seen on the device", [Table(headers, rows, "Observations.")])]


def _row(found: ObservationRecord) -> list[Cell]:
    figures = [f"{name} {value}" for name, value in found.figures.items()]
    figures += [f"{name}: {why}" for name, why in found.not_here.items()]
    said = short("; ".join([*figures, found.message] if found.message else figures), 400)
    rehearsal = ", a rehearsal" if found.rehearsal else ""
    return [
        found.what or found.observation,
        found.model or "-",
        f"{found.status}{rehearsal}",
        said or "-",
        seconds_cell(found.seconds),
        date_text(found.date),
    ]
