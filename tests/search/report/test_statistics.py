"""What Optuna draws of a search: each probe as it was measured, and no HTML of others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.expected import Expected
from planner.report.page.contents import Chart
from search.report.run import Run
from search.report.statistics import FEWEST, varied_axes
from tests.search.report.runs import (
    parts_of,
    run_group,
    texts_of,
    traces_of,
)
from tests.search.tables import BUDGET, invented_table, make_record

TABLE = tuple(invented_table(wobble=0.0))


def run_of(records: Sequence[MeasurementRecord]) -> Run:
    return Run(Path("run"), None, tuple(records))


def charts(run: Run) -> dict[str, Chart]:
    parts = parts_of(run_group(run, "g"), "axes")
    return {part.key: part for part in parts if isinstance(part, Chart)}


def test_each_axis_that_was_varied_has_a_slice_of_every_probe_that_ran() -> None:
    assert varied_axes([r.setting for r in TABLE]) == [
        "batch_size", "precision", "checkpointing", "compile",
    ]  # fmt: skip
    drawn = charts(run_of(TABLE))
    assert list(drawn) == [*(f"g-axes-{n}" for n in (1, 2, 3, 4)), "g-importance"]
    rates = sorted(r.images_per_second for r in TABLE if r.images_per_second)
    for number in (1, 2, 3, 4):
        assert sorted(drawn[f"g-axes-{number}"].figure.data[0].y) == rates


def test_the_axis_that_makes_the_difference_is_the_most_important() -> None:
    table = [r for r in TABLE if r.setting.batch_size in (24, 32)]
    (bars,) = charts(run_of(table))["g-importance"].figure.data
    assert bars.y[-1] == "precision", "the last bar is on top"
    assert "g-importance" not in charts(run_of(table[: FEWEST - 1]))


def test_strings_of_others_are_text_on_every_chart() -> None:
    run = run_of([r.model_copy(update={"unit": "<b>x</b>"}) for r in TABLE[:40]])
    figures = [c.figure for c in parts_of(run_group(run, "g")) if isinstance(c, Chart)]
    drawn = json.dumps([f.to_plotly_json() for f in figures], default=str)
    assert "<b>x" not in drawn
    assert "&lt;b&gt;x" in drawn


# Predicted against measured


def expecting(record: MeasurementRecord, factor: float) -> MeasurementRecord:
    """The record of a probe that was expected to be `factor` times as fast and as large."""
    rate, size = (record.images_per_second or 0.0) * factor, (record.used_bytes or 0) * factor
    expected = Expected.model_validate({
        "phase": "search", "basis": "probes", "fits": 0.97,
        "images_per_second": (rate / 1.1, rate, rate * 1.1),
        "used_bytes": (size / 1.1, size, size * 1.1),
    })  # fmt: skip
    return record.judged_in(BUDGET).model_copy(update={"expected": expected})


def probes(factors: Sequence[float]) -> Run:
    records = [
        expecting(make_record(TrainSetting(batch_size=n, precision="fp32")), f)
        for n, f in enumerate(factors, start=1)
    ]
    return Run(Path("run"), None, tuple(records))


def test_each_probe_stands_where_it_was_expected_and_found() -> None:
    run = probes([1.05, 0.5, 1.0])
    (trace,) = [t for t in traces_of(run, "-expected-rate") if t["mode"] == "markers"]
    rates = [r.images_per_second or 0 for r in run.records]
    assert list(trace["y"]) == rates
    assert list(trace["x"]) == pytest.approx(
        [f * rate for f, rate in zip([1.05, 0.5, 1.0], rates, strict=True)]
    )
    said = " ".join(texts_of(run, "expected"))
    assert "2 of 3 probes found a rate within the interval" in said
    assert "off by no more than 5.0%" in said
