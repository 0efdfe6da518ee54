"""Runs for the tests of their page: a recorded one, and invented ones that end in every way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.core.schema import MeasurementRecord
from planner.report.page.contents import Chart, Group, Page, Table, Text
from planner.report.page.rendering import all_parts
from search.loop.study.records import format_record
from search.report.reading import read_run
from search.report.run import Run
from search.report.writing import run_group
from search.tuning.tune import tune
from tests.search.tables import invented_table

GRID = Path("tests/truth/cpu_grid_2026-11-20.jsonl")
FAILED: dict[str, Any] = {
    "step_seconds": (), "images_per_second": None, "peak_allocated_bytes": None,
    "device_bytes": None, "compile_seconds": None,
}  # fmt: skip


def recorded(tmp_path: Path) -> Run:
    """The grid that was measured, searched again."""
    tune(None, replay=GRID, output=tmp_path / "grid", estimator=None)
    return read_run(tmp_path / "grid")


def ended(record: MeasurementRecord, status: str, message: str = "") -> MeasurementRecord:
    """The same probe, had it ended so."""
    return record.model_copy(update={**FAILED, "status": status, "message": message})


def troubled(tmp_path: Path, **options: Any) -> Run:
    """An invented search in which probes fail in every way."""
    statuses = ("crashed", "timed_out", "unsupported", "non_finite")
    records = [
        ended(r, statuses[i % 4], f"failure {i}") if i % 5 == 2 and r.status == "measured" else r
        for i, r in enumerate(invented_table()[::3])
    ]
    return searched(tmp_path, records, **options)


def searched(tmp_path: Path, records: Sequence[MeasurementRecord], **options: Any) -> Run:
    table = tmp_path / "table.jsonl"
    table.write_bytes(b"".join(format_record(r) for r in records))
    given = {"strategy": "exhaustive", "budget_seconds": 1e6, "headroom": 0.3, **options}
    tune(None, replay=table, output=tmp_path / "run", estimator=None, **given)
    return read_run(tmp_path / "run")


def parts_of(group: Group, section: str = "") -> list[Any]:
    """All parts of a group, or of one of its sections."""
    kept = [s for s in group.sections if section in ("", s.key)]
    return list(all_parts(Page("", "", [Group(group.key, "", kept)])))


def chart_of(run: Run, key: str) -> Chart:
    """The one chart whose key ends so."""
    charts = [p for p in parts_of(run_group(run, "g")) if isinstance(p, Chart)]
    (found,) = [chart for chart in charts if chart.key.endswith(key)]
    return found


def traces_of(run: Run, key: str) -> list[dict[str, Any]]:
    drawn: list[dict[str, Any]] = chart_of(run, key).figure.to_plotly_json()["data"]
    return drawn


def table_of(run: Run, section: str) -> Table:
    return next(p for p in parts_of(run_group(run, "g"), section) if isinstance(p, Table))


def texts_of(run: Run, section: str = "") -> list[str]:
    return [p.text for p in parts_of(run_group(run, "g"), section) if isinstance(p, Text)]
