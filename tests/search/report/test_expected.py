"""Expected against found on a run's page: what records keep, and what stands in for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from planner.page.contents import Table
from planner.schema import MeasurementRecord, TrainSetting
from planner.schema.expected import Expected
from search.report.against import Point, factor_text, off_text, typical_ratio
from search.report.expected import expected_sections
from search.report.run import Run
from tests.search.report.runs import chart_of, ended, parts_of, run_group, texts_of, traces_of
from tests.search.tables import BUDGET, make_record
from tests.search.validation.measurements import exact_record


def expecting(
    record: MeasurementRecord, factor: float, width: float = 1.1, basis: str = "probes",
    fits: float = 0.97,
) -> MeasurementRecord:  # fmt: skip
    """The record of a probe that was expected to be `factor` times as fast and as large."""
    rate, size = (record.images_per_second or 100.0) * factor, (record.used_bytes or 1e9) * factor
    expected = Expected.model_validate({
        "phase": "search", "basis": basis, "fits": fits,
        "images_per_second": (rate / width, rate, rate * width),
        "used_bytes": (size / width, size, size * width),
    })  # fmt: skip
    return record.judged_in(BUDGET).model_copy(update={"expected": expected})


def probes(factors: Sequence[float], **options: object) -> Run:
    records = [
        expecting(make_record(TrainSetting(batch_size=n, precision="fp32")), f, **options)  # type: ignore[arg-type]
        for n, f in enumerate(factors, start=1)
    ]
    return Run(Path("run"), None, tuple(records))


def said_of(run: Run) -> str:
    return " ".join(texts_of(run, "expected"))


def test_each_probe_stands_where_it_was_expected_and_found() -> None:
    run = probes([1.05, 0.5, 1.0])
    points = [t for t in traces_of(run, "-expected-rate") if t["mode"] == "markers"]
    (trace,) = points
    records = run.records
    assert list(trace["y"]) == [r.images_per_second for r in records]
    assert list(trace["x"]) == pytest.approx(
        [f * (r.images_per_second or 0) for f, r in zip([1.05, 0.5, 1.0], records, strict=True)]
    )
    order = [t for t in traces_of(run, "-expected-rate-learned") if t["mode"] == "markers"]
    assert list(order[0]["x"]) == [1, 2, 3]
    assert list(order[0]["y"]) == pytest.approx([1 / 1.05, 2.0, 1.0])
    assert "2 of 3 probes (67%)" in said_of(run)


def test_it_says_whether_the_search_learned() -> None:
    assert "the search learned" in said_of(probes([2, 1.8, 1.5, 1.02, 0.99, 1.01]))
    assert "did not get better" in said_of(probes([1.01, 1.02, 1.01, 1.5, 1.6, 1.4]))
    assert "about the same" in said_of(probes([1.1, 1.1, 1.1, 1.1, 1.1, 1.1]))
    assert "Too few probes" in said_of(probes([1.1, 1.2]))


def test_a_strategy_without_a_belief_is_not_said_to_learn() -> None:
    said = said_of(probes([2, 1.8, 1.5, 1.02, 0.99, 1.01], basis="prior"))
    assert "learned" not in said
    assert "expects nothing by itself" in said


def test_one_probe_and_none_that_ran() -> None:
    run = probes([1.2])
    assert "17% less than expected, outside the interval" in said_of(run)
    assert chart_of(run, "-expected-rate")
    failed = Run(Path("run"), None, tuple(ended(r, "crashed") for r in run.records))
    assert expected_sections(failed, "g") == []
    assert expected_sections(Run(Path("run"), None, ()), "g") == []


def test_chances_to_fit_are_held_against_what_fitted() -> None:
    good = [expecting(make_record(TrainSetting(batch_size=n)), 1.0, fits=0.95) for n in (1, 2, 3)]
    bad = [
        expecting(ended(make_record(TrainSetting(batch_size=n)), "out_of_memory"), 1.0, fits=0.2)
        for n in (4, 5)
    ]
    run = Run(Path("run"), None, (*good, *bad))
    tables = [p for p in parts_of(run_group(run, "g"), "expected") if isinstance(p, Table)]
    rows = [[getattr(c, "text", c) for c in row] for row in tables[-1].rows]
    assert rows == [["10% to 50%", "2", "0", "0%"], ["90% to 100%", "3", "3", "100%"]]


def test_surprises_are_listed_largest_first() -> None:
    tables = [
        p for p in parts_of(run_group(probes([1.0, 0.5, 1.2]), "g"), "expected")
        if isinstance(p, Table) and p.headers[0] == "Probe"
    ]  # fmt: skip
    numbers = [getattr(row[0], "text", "") for row in tables[0].rows]
    assert numbers == ["2", "3"]


def test_an_interval_wider_than_the_chart_is_not_drawn() -> None:
    traces = traces_of(probes([1.0, 1.1, 0.9], width=1000.0), "-expected-rate")
    assert all(t.get("name") != "interval" for t in traces)
    assert any(t.get("name") == "interval" for t in
               traces_of(probes([1.0, 3.0, 0.3], width=1.1), "-expected-rate"))  # fmt: skip


def test_the_estimate_stands_in_for_old_records_of_a_known_card() -> None:
    records = tuple(
        r.model_copy(update={"images_per_second": r.setting.batch_size / r.step_seconds[0]})
        for r in (exact_record(batch).judged_in(BUDGET) for batch in (2, 4, 8, 16))
    )
    run = Run(Path("run"), None, records)
    said = said_of(run)
    assert "do not say what the search expected" in said
    assert "interval" not in said
    (marks,) = [t for t in traces_of(run, "-expected-rate") if t["mode"] == "markers"]
    # The invented device is half as fast as is estimated.
    ratios = [y / x for x, y in zip(marks["x"], marks["y"], strict=True)]
    assert ratios == pytest.approx([0.5] * 4, rel=0.02)


def test_old_records_of_an_unknown_device_have_no_section() -> None:
    run = Run(Path("run"), None, tuple(make_record(TrainSetting(batch_size=n)) for n in (1, 2)))
    assert expected_sections(run, "g") == []


def test_units_of_others_are_text() -> None:
    run = probes([1.0, 1.1])
    run = Run(run.folder, None, tuple(
        r.model_copy(update={"unit": "<i>u</i>"}) for r in run.records
    ))  # fmt: skip
    drawn = json.dumps(chart_of(run, "-expected-rate").figure.to_plotly_json(), default=str)
    assert "<i>u" not in drawn
    assert "&lt;i&gt;u" in drawn


def test_how_far_off_reads_as_words() -> None:
    assert off_text(1.123) == "12% more"
    assert off_text(0.97) == "3.0% less"
    assert off_text(4.1) == "4.1 times as much"
    assert factor_text(1.034) == "3.4%"
    assert factor_text(3.0) == "a factor of 3"
    points = [Point(1, "", "", 1.0, 0.5), Point(2, "", "", 1.0, 2.0), Point(3, "", "", 1.0, 1.0)]
    assert typical_ratio(points) == pytest.approx(2.0)
