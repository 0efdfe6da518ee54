"""The page of a search for a loader, and of step and loader together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.core.schema.loading import FedRecord, Feeding
from planner.core.units import format_rate
from planner.report.page.contents import Chart, Page
from planner.report.page.rendering import page_html
from search.report.lead import run_lead
from search.report.loader import loader_code
from search.report.reading import read_run
from search.report.run import LoaderRun, Run
from search.report.writing import run_group
from tests.search.report.runs import parts_of, recorded, texts_of

LOADERS = Path("tests/truth/cpu_loaders_2026-11-22.jsonl")


@pytest.fixture(scope="module")
def measured() -> Run:
    return read_run(LOADERS)


def loaders_of(run: Run) -> LoaderRun:
    return run.loaders


def test_only_the_loader_is_spoken_of(measured: Run) -> None:
    assert [section.key for section in run_group(measured, "g").sections] == ["loader"]
    said = texts_of(measured, "loader")[0]
    assert said.startswith("Best of 52 probes")
    best = loaders_of(measured).best
    assert format_rate(best.images_per_second) in said
    assert run_lead(measured).startswith("Best loader so far")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_code_makes_that_loader(measured: Run) -> None:
    torch = pytest.importorskip("torch")
    for record in loaders_of(measured).records:
        names: dict[str, object] = {"dataset": [torch.zeros(1)] * 64}
        exec(loader_code(record.setting), names)
        made = names["loader"]
        for name, value in record.setting.arguments.items():
            assert getattr(made, name) == value


def test_step_and_loader_together(measured: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path)
    loader = loaders_of(measured).best
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
    assert "the loader is the limit" in said[0]
    assert "33%" in said[0]
    assert "About 6 workers" in said[0]
    assert said[1] == "a note"
    (chart,) = [p for p in parts_of(run_group(both, "g"), "feeding") if isinstance(p, Chart)]
    drawn = chart.figure.to_plotly_json()["data"][0]
    step = run.found.evidence
    assert list(drawn["x"]) == [
        step.images_per_second, loader.images_per_second, 420.0, 410.0,
    ]  # fmt: skip
    keys = [section.key for section in run_group(both, "g").sections]
    assert keys.index("feeding") < keys.index("loader")
    assert page_html(Page("a", "", [run_group(both, "g")]))
