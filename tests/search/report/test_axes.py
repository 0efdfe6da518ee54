"""Axis by axis on a run's page: pairs, importances, the map, and predicted against measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from planner.page.contents import Chart, Number, Section, Table
from planner.schema import MeasurementRecord, TrainSetting
from planner.units import GIB
from search.report.axes import axes_sections
from search.report.axis_pairs import effects_of, ran_settings, varied_axes
from search.report.expected import expected_sections
from search.report.importance import FEWEST, importances
from search.report.run import Run
from tests.search.report.runs import (
    chart_of,
    ended,
    parts_of,
    run_group,
    table_of,
    texts_of,
    traces_of,
)
from tests.search.tables import invented_table, make_record, true_seconds
from tests.search.validation.measurements import exact_record

TABLE = tuple(invented_table(wobble=0.0))


def run_of(records: Sequence[MeasurementRecord]) -> Run:
    return Run(Path("run"), None, tuple(records))


def keys(sections: Sequence[Section]) -> list[str]:
    return [section.key for section in sections]


def test_a_value_is_compared_with_settings_that_differ_in_nothing_else() -> None:
    ran = ran_settings(TABLE)
    settings = [r.setting for r in TABLE]
    axes = varied_axes(settings)
    assert axes == ["batch_size", "precision", "checkpointing", "compile"]
    compiled = {e.value: e for e in effects_of("compile", axes, settings, ran)}
    factor = compiled["default"].rate
    assert factor is not None
    assert compiled["default"].against == "off"
    pairs = [
        true_seconds(s.uncompiled()) / true_seconds(s)
        for s in (r.setting for r in ran)
        if s.compile == "default" and any(r.setting == s.uncompiled() for r in ran)
    ]
    assert factor.num_pairs == len(pairs)
    assert (factor.least, factor.most) == pytest.approx((min(pairs), max(pairs)), rel=0.01)
    assert compiled["default"].memory is not None
    assert compiled["default"].memory.median == 1  # the invented compiler saves no memory


def test_a_batch_is_compared_with_the_next_smaller_one() -> None:
    settings = [r.setting for r in TABLE]
    found = effects_of("batch_size", varied_axes(settings), settings, ran_settings(TABLE))
    assert [e.value for e in found] == sorted({s.batch_size for s in settings})
    assert [e.against for e in found[1:]] == [e.value for e in found[:-1]]
    assert all(e.memory is None or e.memory.least > 1 for e in found[1:])
    assert found[0].rate is None


def test_values_without_a_pair_are_said_to_have_none() -> None:
    run = run_of([
        make_record(TrainSetting(batch_size=8, precision="bf16", attention="sdpa")),
        make_record(TrainSetting(batch_size=16, precision="fp32", attention="eager")),
    ])  # fmt: skip
    (said,) = [t for t in texts_of(run, "axes") if "differ in one axis only" in t]
    assert "No two settings" in said
    assert {row[0] for row in table_of(run, "axes").rows} == {"batch", "precision", "attention"}


def test_the_page_has_a_row_for_every_value_and_a_map_of_the_batch() -> None:
    run = run_of(TABLE)
    rows = table_of(run, "axes").rows
    assert len(rows) == 11 + 2 + 2 + 2
    ran = sum(r.status == "measured" for r in TABLE)
    of_precision = [row[3] for row in rows if row[0] == "precision"]
    assert sum(c.value or 0 for c in of_precision if isinstance(c, Number)) == ran
    (heat,) = traces_of(run, "-axes-heat")
    fastest = max(r.images_per_second or 0 for r in TABLE)
    assert max(z for row in heat["z"] for z in row if z is not None) == pytest.approx(fastest)
    pairs = traces_of(run, "-axes-pairs")
    assert {t.get("name") for t in pairs} >= {"images/s", "memory"}
    assert any("show is that of precision: bf16" in t for t in texts_of(run, "axes"))


def test_what_did_not_run_is_named_on_the_map() -> None:
    fails = [ended(r, "out_of_memory") if r.setting.batch_size >= 64 else r for r in TABLE]
    (heat,) = traces_of(run_of(fails), "-axes-heat")
    words = {batch: set(row) for batch, row in zip(heat["y"], heat["text"], strict=True)}
    assert words["256"] == {"no memory"}
    assert "no memory" not in words["4"]


def test_the_axis_that_makes_the_difference_is_the_most_important() -> None:
    pytest.importorskip("optuna")
    table = [r for r in TABLE if r.setting.batch_size in (24, 32)]
    ran = ran_settings(table)
    shares = importances(ran, varied_axes([r.setting for r in table]))
    assert next(iter(shares)) == "precision"
    assert sum(shares.values()) == pytest.approx(1)
    assert importances(ran[: FEWEST - 1], ["precision", "compile"]) == {}


def test_a_global_batch_makes_no_axis_of_accumulation() -> None:
    split = [TrainSetting(batch_size=b, accumulate=64 // b) for b in (8, 16, 32)]
    assert varied_axes(split) == ["batch_size"]
    assert varied_axes([*split, TrainSetting(batch_size=8)]) == ["batch_size", "accumulate"]


@pytest.mark.parametrize("num", [0, 1])
def test_of_one_setting_or_none_there_is_no_section(num: int) -> None:
    assert axes_sections(run_of(TABLE[:num]), "g") == []
    assert axes_sections(run_of([TABLE[0]] * 3 * num), "g") == []


def test_where_nothing_ran_the_table_says_so() -> None:
    run = run_of([ended(r, "crashed", "it broke") for r in TABLE[:8]])
    assert all(row[4] == Number(None, "-") for row in table_of(run, "axes").rows)
    assert not [p for p in parts_of(run_group(run, "g"), "axes") if hasattr(p, "figure")]


def test_of_several_models_pairs_are_made_within_each() -> None:
    other = TABLE[0].model.model_copy(update={"name": "other"})
    run = run_of([TABLE[0], TABLE[1].model_copy(update={"model": other})])
    assert axes_sections(run, "g") == []
    both = run_of([*TABLE[:30], *(r.model_copy(update={"model": other}) for r in TABLE[:30])])
    assert chart_of(both, "g-1-axes-pairs") is not chart_of(both, "g-2-axes-pairs")


def test_strings_of_others_are_text_on_every_chart() -> None:
    records = [r.model_copy(update={"unit": "<b>x</b>"}) for r in TABLE[:40]]
    for key in ("-axes-pairs", "-axes-heat"):
        drawn = json.dumps(chart_of(run_of(records), key).figure.to_plotly_json(), default=str)
        assert "<b>x" not in drawn
        assert "&lt;b&gt;x" in drawn


def test_charts_of_very_many_values_stay_readable() -> None:
    many = [
        make_record(TrainSetting(batch_size=batch, precision=precision), 10**15)
        for batch in range(1, 501)
        for precision in ("fp32", "bf16")
    ]
    charts = [
        part for part in parts_of(run_group(run_of(many), "g"), "axes") if isinstance(part, Chart)
    ]
    assert any(chart.key.endswith("-heat") for chart in charts)
    assert all(chart.height_px < 1500 for chart in charts)


# Predicted against measured


def validated() -> Run:
    return run_of([exact_record(batch) for batch in (2, 4, 8, 16)])


def test_records_that_no_search_asked_for_are_held_against_the_estimate() -> None:
    run = validated()
    assert keys(expected_sections(run, "g")) == ["validation"]
    figures = {str(row[1]): row for row in table_of(run, "validation").rows}
    assert figures["reserved"][3] == Number(0.0, "0.0%")
    # The invented device takes twice as long as is predicted, which is half of what is measured.
    assert figures["step time"][3:] == [Number(0.5, "50.0%")] * 2
    assert chart_of(run, "-validation-step-time")
    said = texts_of(run, "validation")[0]
    assert "Step time is predicted to within 50.0%" in said
    every = [p for p in parts_of(run_group(run, "g"), "validation") if isinstance(p, Table)][-1]
    assert len(every.rows) == 4
    by_axis = next(
        p for p in parts_of(run_group(run, "g"), "validation")
        if isinstance(p, Table) and p.headers[0] == "Axis"
    )  # fmt: skip
    assert by_axis.rows[0][-1] == Number(-0.5, "-50.0%")


def test_a_search_s_records_are_no_validation() -> None:
    run = validated()
    limited = replace(run, records=tuple(r.judged_in(12 * GIB) for r in run.records))
    assert keys(expected_sections(limited, "g")) == ["expected"]
