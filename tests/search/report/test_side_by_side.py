"""Several runs on one page, runs beside estimates, and the page's title and lead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import DeviceInfo, MeasurementRecord, SwinConfig, TrainSetting
from planner.estimation.estimate import estimate_ledger, resolve
from planner.estimation.ledgers import step_ledger
from planner.machine.hardware import Gpu, find_gpu
from planner.report.page.contents import Chart, Number, Section, Table
from planner.report.page.rendering import page_html
from planner.report.pages.step import Step
from planner.report.settings import describe_setting
from search.report.lead import lead_of, title_of
from search.report.reading import read_run
from search.report.run import Run
from search.report.side_by_side import beside_group, matching
from search.report.writing import MOST_GROUPS, make_page
from search.tuning.tune import tune
from tests.search.tables import make_record

MODEL = SwinConfig(name="small", image_size=(64, 64), window_size=2, depths=(1, 1, 1, 1))
CARD = find_gpu("rtx-4090")
DEVICE = DeviceInfo(
    kind="cuda", name=CARD.device_names[0], total_bytes=CARD.memory_bytes, driver="580.1"
)


def step_with(batch: int = 8, gpu: Gpu | None = CARD, **fields: Any) -> Step:
    model, setting = resolve(MODEL, TrainSetting(batch_size=batch, **fields))
    ledger = step_ledger(model, setting)
    return Step(estimate_ledger(model, setting, ledger, gpu), ledger, gpu)


def record(batch: int, model: SwinConfig = MODEL, **more: Any) -> MeasurementRecord:
    setting = TrainSetting(batch_size=batch, precision="bf16").with_recipe(of_swin=True)
    made = make_record(setting, model=model, device=DEVICE, probe_id=f"probe-{batch}")
    return made.model_copy(update=more)


def run_of(name: str, *records: MeasurementRecord) -> Run:
    return Run(Path(name), None, records)


def section_of(subjects: list[Step | Run], key: str) -> Section:
    (section,) = [s for s in beside_group(subjects).sections if s.key == key]
    return section


def table_of(section: Section, number: int = 0) -> Table:
    return [part for part in section.parts if isinstance(part, Table)][number]


def test_runs_are_told_by_their_rates_memory_settings_and_probes() -> None:
    runs: list[Step | Run] = [run_of("one", record(8), record(16)), run_of("two", record(64))]
    table = table_of(section_of(runs, "runs"))
    assert [row[0] for row in table.rows] == ["one", "two"]
    cells = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    rates = [row["Images/s"] for row in cells]
    assert [rate.value for rate in rates if isinstance(rate, Number)] == [
        record(16).images_per_second, record(64).images_per_second,
    ]  # fmt: skip
    assert table.marked == [1]
    assert [row["Batch size"] for row in cells] == [Number(16, "16"), Number(64, "64")]


def test_an_estimate_stands_beside_the_probe_of_the_same_setting_on_its_card() -> None:
    step, run = step_with(8), run_of("one", record(8), record(16))
    assert [found.probe_id for found in matching(step, run)] == ["probe-8"]
    (row,) = table_of(section_of([step, run], "measured")).rows
    error = row[6]
    used = record(8).used_bytes
    assert error.value == pytest.approx(step.estimate.device_total_bytes / used - 1)


def test_forty_subjects_are_all_compared_and_few_shown_one_by_one() -> None:
    step = step_with(8)
    steps: list[Step | Run] = [
        Step(step.estimate, step.ledger, replace(CARD, name=f"card-{n}")) for n in range(40)
    ]
    page = make_page(steps)
    assert len(page.groups) == 1 + MOST_GROUPS + 1
    assert f"{40 - MOST_GROUPS} more" in page.groups[-1].sections[0].parts[0].text  # type: ignore[union-attr]
    assert len(table_of(page.groups[0].sections[0]).rows) == 40
    assert len(page_html(page).encode()) < 5_000_000


def test_hostile_names_stay_text() -> None:
    name = "<script>alert(1)</script>\x1b[31m"
    runs: list[Step | Run] = [
        run_of(f"{name}-{n}", record(8 * n, MODEL.model_copy(update={"name": name})))
        for n in (1, 2)
    ]
    page = make_page([*runs, step_with(8)])
    html = page_html(page)
    assert "<script>alert" not in html
    assert "\x1b" not in html
    for section in page.groups[0].sections:
        for part in section.parts:
            if isinstance(part, Chart):
                for trace in part.figure.data:
                    assert not any("<script" in label for label in trace.y)


def test_title_and_lead_of_a_run_that_ended_are_its_recommendation(
    tmp_path: Path, table: Path
) -> None:
    tune(None, replay=table, output=tmp_path / "run", estimator=None)
    run = read_run(tmp_path / "run")
    gain, setting = f"{run.found.gain:.2f} × the plain default.", run.found.setting
    assert lead_of([run]) == "", "its first section says it"
    beside = lead_of([run, step_with(8)])
    assert f"Recommended: {describe_setting(setting, run.found.model)}: " in beside
    assert beside.endswith(gain)
    assert title_of([run]).startswith("native:invented on Test GPU: ")
