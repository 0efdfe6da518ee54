"""What the page shows of searches, of several subjects, and of both, is what the records hold."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import DeviceInfo, MeasurementRecord, SwinConfig, TrainSetting
from planner.core.units import GIB, format_bytes, format_rate
from planner.machine.hardware import Gpu, find_gpu
from planner.report.estimates import differing_fields
from planner.report.page.contents import Chart, Copyable, Facts, Number, Table, Text
from planner.report.page.rendering import all_parts, page_html
from planner.report.pages import is_probe_of, make_page
from planner.report.searches import SearchRun
from planner.report.step import PredictedStep
from planner.trainers.emission import emit
from search.loop.options import read_options
from search.loop.records import read_records
from search.runs import make_run, read_run, report_estimate
from tests.search.replays import leave_run
from tests.search.tables import invented_table, make_record

GRID = Path("tests/truth/cpu_grid_2026-11-20.jsonl")
MODEL = SwinConfig(name="small", image_size=(64, 64), window_size=2, depths=(1, 1, 1, 1))
CARD = find_gpu("rtx-4090")
DEVICE = DeviceInfo(
    kind="cuda", name=CARD.device_names[0], total_bytes=CARD.memory_bytes, driver="580.1"
)
FAILED: dict[str, Any] = {
    "step_seconds": (), "images_per_second": None, "peak_allocated_bytes": None,
    "device_bytes": None, "compile_seconds": None,
}  # fmt: skip


def ended(record: MeasurementRecord, status: str, message: str = "") -> MeasurementRecord:
    """The same probe, had it ended so."""
    return record.model_copy(update={**FAILED, "status": status, "message": message})


def run_of(records: Sequence[MeasurementRecord], name: str = "run") -> SearchRun:
    return make_run(name, None, tuple(records))


def searched(tmp_path: Path, records: Sequence[MeasurementRecord]) -> SearchRun:
    leave_run(tmp_path / "run", records, tolerance=0.0, headroom=0.3)
    return read_run(tmp_path / "run")


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> SearchRun:
    """The grid that was measured, searched again."""
    records = read_records(GRID).records
    return read_run(leave_run(tmp_path_factory.mktemp("grid"), records))


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> SearchRun:
    """An invented search in which probes fail in every way."""
    statuses = ("crashed", "timed_out", "unsupported", "non_finite")
    return searched(tmp_path_factory.mktemp("trouble"), [
        ended(r, statuses[i % 4], f"failure {i}") if i % 5 == 2 and r.status == "measured" else r
        for i, r in enumerate(invented_table()[::3])
    ])  # fmt: skip


def html_of(*subjects: PredictedStep | SearchRun) -> str:
    return page_html(make_page(subjects))


def parts_of(kind: type, *subjects: PredictedStep | SearchRun) -> Iterator[Any]:
    return (part for part in all_parts(make_page(subjects)) if isinstance(part, kind))


def traces_of(run: SearchRun, key: str) -> dict[str, Any]:
    (chart,) = [chart for chart in parts_of(Chart, run) if chart.key.endswith(key)]
    return {trace["name"]: trace for trace in chart.figure.to_plotly_json()["data"]}


def said_by(*subjects: PredictedStep | SearchRun) -> str:
    return "\n".join(part.text for part in parts_of(Text, *subjects))


def table_with(header: str, *subjects: PredictedStep | SearchRun) -> Table:
    return next(table for table in parts_of(Table, *subjects) if header in table.headers)


def test_the_answer_says_setting_rate_memory_and_gain(grid: SearchRun) -> None:
    found, said = grid.result, said_by(grid)
    assert found is not None
    assert found.evidence is not None
    assert "batch 128, bf16, adamw" in said
    assert format_bytes(found.evidence.used_bytes or 0) in said
    assert f"{found.gain:.2f} × the plain default" in said
    assert format_rate(found.evidence.images_per_second) in make_page([grid]).title
    emitted = emit(found, "pytorch")
    copied = {part.label: part.text for part in parts_of(Copyable, grid)}
    start = f"planner emit {grid.place} --for pytorch --output train.py"
    launch = next(text for label, text in copied.items() if label.startswith("Start training"))
    assert launch == f"{start}\n{emitted.launch}"


@pytest.mark.parametrize("name", ["grid", "trouble"])
def test_memory_against_rate_has_every_probe_and_the_front(
    name: str, request: pytest.FixtureRequest
) -> None:
    run: SearchRun = request.getfixturevalue(name)
    drawn = traces_of(run, "-front")
    points: dict[str, list[tuple[float, float]]] = {
        name: sorted(zip(drawn[name]["x"], drawn[name]["y"], strict=True)) if name in drawn else []
        for name in ("over the memory limit", "probe", "fastest for its memory")
    }
    measured = [r for r in run.records if r.status == "measured"]
    assert sorted(points["over the memory limit"] + points["probe"]) == sorted(
        ((r.used_bytes or 0) / GIB, r.images_per_second) for r in measured
    )
    for x, y in points["fastest for its memory"]:
        assert not any(there <= x and rate > y for there, rate in points["probe"])
    assert all(x * GIB > (run.budget_bytes or 0) for x, _ in points["over the memory limit"])


def test_the_table_has_every_probe_with_its_reason(trouble: SearchRun) -> None:
    table = table_with("ended", trouble)
    for number, (row, record) in enumerate(zip(table.rows, trouble.records, strict=True), 1):
        cells: dict[str, Any] = dict(zip(table.headers, row, strict=True))
        assert cells["probe"] == Number(number, str(number))
        rate, memory = cells["images/s (95% range)"], cells["memory"]
        assert (rate.value, memory.value) == (record.images_per_second, record.used_bytes)
        assert record.message in cells["ended"]
    assert trouble.result is not None
    assert {trouble.records[i].setting for i in table.marked} == {trouble.result.setting}


def test_the_options_of_a_search_are_said(grid: SearchRun) -> None:
    assert grid.result is not None
    asked = read_options({"restrict": {"precision": "bf16"}, "budget_seconds": 90}).kept
    run = replace(grid, result=grid.result.model_copy(update={"asked": asked}))
    facts = dict(fact for part in parts_of(Facts, run) for fact in part.pairs)
    assert facts["Asked"] == "restrict={'precision': ['bf16']}, budget_seconds=90.0"


def test_nothing_fits(tmp_path: Path) -> None:
    run = searched(
        tmp_path, [ended(r, "out_of_memory", "CUDA out of memory") for r in invented_table()[:9]]
    )
    assert run.result is not None
    assert run.result.setting is None
    assert run.result.advice in said_by(run)
    assert html_of(run)


@pytest.mark.parametrize("status", ["measured", "crashed"])
def test_one_probe_of_a_run_that_goes_on(status: str) -> None:
    record = make_record(TrainSetting(batch_size=8))
    run = run_of([record if status == "measured" else ended(record, status)])
    assert ("Best of 1 probe" in said_by(run)) == (status == "measured")
    keys = [chart.key for chart in parts_of(Chart, run)]
    assert ("g1-front" in keys) == (status == "measured")
    assert html_of(replace(run, records=(), best=None, faults=("line 1 is torn",)))


def test_each_axis_has_its_probes_and_joins_those_that_differ_in_it_only() -> None:
    ran = [r for r in invented_table(wobble=0.0) if r.status == "measured"]
    charts = [chart for chart in parts_of(Chart, run_of(ran)) if "-axes-" in chart.key]
    axes = differing_fields([record.setting for record in ran])
    for axis, chart in zip(axes, charts, strict=True):
        drawn, *lines = chart.figure.data
        assert len(drawn.x) == len(ran)
        assert "Grey" not in chart.description
        assert lines
        for line in lines:
            alike = {
                repr(record.setting.model_copy(update={axis: None}))
                for record in ran if record.images_per_second in line.y
            }  # fmt: skip
            assert len(alike) == 1 < len(set(line.x))


# Several subjects


def step_with(batch: int = 8, gpu: Gpu | None = CARD, **fields: Any) -> PredictedStep:
    return report_estimate(MODEL, TrainSetting(batch_size=batch, **fields), gpu=gpu)


def measured(batch: int, model: SwinConfig = MODEL) -> MeasurementRecord:
    setting = TrainSetting(batch_size=batch, precision="bf16").with_recipe(of_swin=True)
    return make_record(setting, model=model, device=DEVICE, probe_id=f"probe-{batch}")


def test_runs_are_told_by_their_rates_memory_settings_and_probes() -> None:
    runs = [run_of([measured(8), measured(16)], "one"), run_of([measured(64)], "two")]
    table = table_with("run", *runs)
    assert [row[0] for row in table.rows] == ["one", "two"]
    rates = [row[1].value for row in table.rows if isinstance(row[1], Number)]
    assert rates == [measured(16).images_per_second, measured(64).images_per_second]
    assert table.marked == [1]
    settings = [str(row[table.headers.index("setting")]) for row in table.rows]
    assert [text.partition(",")[0] for text in settings] == ["batch 16", "batch 64"]


def test_an_estimate_stands_beside_the_probe_of_the_same_setting_on_its_card() -> None:
    step, run = step_with(8), run_of([measured(8), measured(16)])
    assert [record.probe_id for record in run.records if is_probe_of(record, step)] == ["probe-8"]
    (row,) = table_with("memory predicted", step, run).rows
    error, used = row[5], measured(8).used_bytes
    assert isinstance(error, Number)
    assert error.value == pytest.approx(step.estimate.device_total_bytes / (used or 1) - 1)


def test_bars_are_what_each_needs_and_how_fast_it_is() -> None:
    steps = [step_with(batch, card, attention="eager")
             for card in (CARD, find_gpu("a100-sxm-80gb")) for batch in (2, 40_000)]  # fmt: skip
    assert [step.estimate.fits for step in steps] == [True, False, True, False]
    charts = {chart.key: chart.figure.data for chart in parts_of(Chart, *steps)}
    memory, limits = charts["beside-memory"]
    assert list(memory.x) == [step.estimate.device_total_bytes / GIB for step in steps]
    assert list(limits.x) == [(step.estimate.budget_bytes or 0) / GIB for step in steps]
    (rates,) = charts["beside-rate"]
    ran = [step.estimate.throughput for step in steps if step.estimate.fits]
    assert list(rates.x) == [time.all_images_per_second for time in ran if time]
    reach = [time.uncertainty * time.all_images_per_second for time in ran if time]
    assert [*rates.error_x.array, *rates.error_x.arrayminus] == pytest.approx(reach * 2)
    assert list(rates.y) == ["rtx-4090, batch 2", "a100-sxm-80gb, batch 2"]
