"""The page of a search for a loader, and of step and loader together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.page.contents import Chart, Copyable, Number, Page
from planner.page.rendering import page_html
from planner.schema.loading import FedRecord, Feeding, LoaderRecord
from search.loader.finding import find_loader
from search.report.group import run_group
from search.report.lead import run_lead
from search.report.loader import loader_code
from search.report.reading import read_run
from search.report.run import LoaderRun, Run
from search.report.wording import rate_text
from tests.search.loader.simulated import SOURCE, Machine, SimulatedProber
from tests.search.report.runs import parts_of, recorded, table_of, texts_of, traces_of

LOADERS = Path("tests/truth/cpu_loaders_2026-11-22.jsonl")


@pytest.fixture(scope="module")
def measured() -> Run:
    return read_run(LOADERS)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Run:
    prober = SimulatedProber(Machine(2, {"torchvision": 0.01, "timm": 0.008}, noise=0.002))
    output = tmp_path_factory.mktemp("data")
    find_loader(SOURCE, prober=prober, output=output, device="cpu", workers="0,1,2,3",
                pipelines="torchvision,timm")  # fmt: skip
    return read_run(output)


def loaders_of(run: Run) -> LoaderRun:
    assert run.loaders is not None
    return run.loaders


def test_only_the_loader_is_spoken_of(measured: Run) -> None:
    assert [section.key for section in run_group(measured, "g").sections] == ["loader"]
    said = texts_of(measured, "loader")[0]
    assert said.startswith("Best of 52 probes")
    best = loaders_of(measured).best
    assert best is not None
    assert rate_text(best.images_per_second) in said
    assert run_lead(measured).startswith("Best loader so far")


def test_what_was_recommended_is_said_with_its_code(found: Run) -> None:
    kept = loaders_of(found).found
    assert kept is not None
    assert kept.setting is not None
    said = texts_of(found, "loader")
    assert kept.setting.title in said[0]
    assert set(kept.notes) <= set(said)
    (code,) = [p.text for p in parts_of(run_group(found, "g"), "loader")
               if isinstance(p, Copyable)]  # fmt: skip
    assert code == loader_code(kept.setting)
    assert run_lead(found).startswith("Recommended loader")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_code_makes_that_loader(measured: Run) -> None:
    torch = pytest.importorskip("torch")
    for record in loaders_of(measured).records:
        names: dict[str, object] = {"dataset": [torch.zeros(1)] * 64}
        exec(loader_code(record.setting), names)
        made = names["loader"]
        for name, value in record.setting.arguments.items():
            assert getattr(made, name) == value


def test_every_measured_loader_is_a_point_by_its_workers(measured: Run) -> None:
    drawn = [
        (x, y) for t in traces_of(measured, "-workers") if t["mode"] == "lines+markers"
        for x, y in zip(t["x"], t["y"], strict=True)
    ]  # fmt: skip
    records = [r for r in loaders_of(measured).records if r.status == "measured"]
    assert sorted(drawn) == sorted((r.setting.workers, r.images_per_second) for r in records)
    order = [n for t in traces_of(measured, "-loader-order") if t["mode"] == "markers"
             for n in t["x"]]  # fmt: skip
    assert sorted(order) == list(range(1, 53))
    table = table_of(measured, "loader")
    rates = [row[2].value for row in table.rows if isinstance(row[2], Number)]
    assert rates == [r.images_per_second for r in loaders_of(measured).records]


def test_the_best_and_the_fastest_have_a_name_each(measured: Run) -> None:
    """The best is the plainest that noise cannot tell from the fastest, and may be slower."""
    best = loaders_of(measured).best
    assert best is not None
    (star,) = [t for t in traces_of(measured, "-workers") if t["name"] == "best so far"]
    assert list(star["y"]) == [best.images_per_second]
    assert star["textposition"] == "bottom right"
    (line,) = [t for t in traces_of(measured, "-order") if t["mode"] == "lines"]
    assert line["name"] == "fastest so far"
    assert line["y"][-1] > star["y"][0]


def test_the_name_of_a_loader_of_many_workers_lies_within_the_chart(found: Run) -> None:
    best = loaders_of(found).best
    assert best is not None
    assert best.setting.workers >= 2, "of 3 at most"
    (star,) = [t for t in traces_of(found, "-workers") if t["name"] == "recommended"]
    assert star["textposition"] == "bottom left"


def test_what_was_expected_of_loaders_is_held_against_what_they_reached(found: Run) -> None:
    table = table_of(found, "loader-expected")
    records = dict(enumerate(loaders_of(found).records, start=1))
    expected = [n for n, r in records.items() if r.expected is not None and r.images_per_second]
    drawn = [p for p in parts_of(run_group(found, "g"), "loader-expected") if isinstance(p, Chart)]
    points = [n for t in drawn[1].figure.data if t.mode == "markers" for n in t.x]
    assert sorted(points) == expected
    assert len(expected) > 2
    for row in table.rows:
        cells = dict(zip(table.headers, row, strict=True))
        assert isinstance(cells["Probe"], Number)
        assert cells["Setting"] == records[int(cells["Probe"].value or 0)].setting.title


def test_stages_are_those_that_were_timed(measured: Run) -> None:
    last: dict[str, LoaderRecord] = {
        r.setting.pipeline: r for r in loaders_of(measured).records if r.stage_seconds
    }
    traces = {t["name"]: t for t in traces_of(measured, "-stages")}
    for pipeline, record in last.items():
        for stage, seconds in record.stage_seconds.items():
            if stage in traces:
                at = list(traces[stage]["y"]).index(pipeline)
                assert traces[stage]["x"][at] == pytest.approx(1e3 * seconds)
            else:
                assert not seconds


def test_loaders_that_all_failed(measured: Run) -> None:
    failed = tuple(
        r.model_copy(update={"status": "crashed", "message": "<b>no</b>", "batch_seconds": (),
                             "images_per_second": None, "stage_seconds": {}})
        for r in loaders_of(measured).records[:3]
    )  # fmt: skip
    run = replace(measured, loaders=LoaderRun(None, failed))
    assert texts_of(run, "loader")[0].startswith("Nothing loads pictures after 3 probes")
    html = page_html(Page("a", "", [run_group(run, "g")]))
    assert "<b>no</b>" not in html


def test_step_and_loader_together(measured: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path)
    assert run.found is not None
    assert run.found.setting is not None
    loader = loaders_of(measured).best
    assert loader is not None
    fed = FedRecord(
        model=run.found.model, setting=run.found.setting, loader=loader.setting, data=loader.data,
        status="measured", step_seconds=(0.3, 0.31), wait_seconds=(0.1, 0.1),
        resident_seconds=(0.2,), images_per_second=410.0, predicted=420.0,
    )  # fmt: skip
    feeding = Feeding(loader=loader.setting, evidence=loader, bound="loader", waiting_share=0.33,
                      needed_workers=6, together=fed, notes=("a note",))  # fmt: skip
    both = replace(
        run, found=run.found.model_copy(update={"feeding": feeding}), fed=(fed,),
        loaders=measured.loaders,
    )  # fmt: skip
    said = texts_of(both, "feeding")
    assert "the loader bounds" in said[0]
    assert "33%" in said[0]
    assert "About 6 workers" in said[0]
    assert said[1] == "a note"
    (chart,) = [p for p in parts_of(run_group(both, "g"), "feeding") if isinstance(p, Chart)]
    drawn = chart.figure.to_plotly_json()["data"][0]
    step = run.found.evidence
    assert step is not None
    assert list(drawn["x"]) == [
        step.images_per_second, loader.images_per_second, 420.0, 410.0,
    ]  # fmt: skip
    keys = [section.key for section in run_group(both, "g").sections]
    assert keys.index("feeding") < keys.index("loader")
    assert page_html(Page("a", "", [run_group(both, "g")]))
