"""What the page draws of a search is what the records hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import TrainSetting
from planner.core.units import GIB, format_bytes, format_rate
from planner.report.page.contents import Chart, Copyable, Number, Page, Tabs
from planner.report.page.rendering import page_html
from planner.trainers.emission import TARGETS, emit
from search.loop.contenders import contenders, pareto_front
from search.loop.options import SearchOptions
from search.loop.request import kept_options
from search.report.rerun import search_again
from search.report.run import Run
from search.report.writing import run_group
from tests.search.report.runs import (
    ended,
    parts_of,
    recorded,
    searched,
    table_of,
    texts_of,
    traces_of,
    troubled,
)
from tests.search.tables import MODEL, invented_table, make_record

FRONT = "-front"


def html_of(run: Run) -> str:
    return page_html(Page("a run", "", [run_group(run, "g")]))


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return troubled(tmp_path_factory.mktemp("trouble"))


def test_the_answer_says_setting_rate_memory_budget_and_gain(grid: Run) -> None:
    found = grid.found
    said = texts_of(grid, "answer")[0]
    assert "batch 128, bf16, adamw" in said
    assert format_rate(found.evidence.images_per_second) in said
    assert format_bytes(found.evidence.used_bytes or 0) in said
    assert f"of the {format_bytes(grid.budget_bytes or 0)} allowed" in said
    assert f"{found.gain:.2f} × the plain default's" in said


@pytest.mark.parametrize("name", ["grid", "trouble"])
def test_memory_against_rate_has_every_probe_and_the_front(
    name: str, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(name)
    drawn = {t["name"]: t for t in traces_of(run, FRONT)}
    points = {
        name: sorted(zip(drawn[name]["x"], drawn[name]["y"], strict=True))
        for name in ("over the budget", "probe", "unbeaten")
    }
    measured = [r for r in run.records if r.status == "measured"]
    assert sorted(at for held in points.values() for at in held) == sorted(
        ((r.used_bytes or 0) / GIB, r.images_per_second) for r in measured
    )
    front = pareto_front(contenders(run.records, run.budget_bytes))
    assert points["unbeaten"] == [((c.num_bytes or 0) / GIB, c.rate) for c in front]
    assert all(x * GIB > (run.budget_bytes or 0) for x, _ in points["over the budget"])


def test_the_table_has_every_probe_with_its_reason(trouble: Run) -> None:
    table = table_of(trouble, "probes")
    assert len(table.rows) == len(trouble.records)
    for number, (row, record) in enumerate(zip(table.rows, trouble.records, strict=True), start=1):
        cells = dict(zip(table.headers, row, strict=True))
        assert cells["probe"] == Number(number, str(number))
        rate, memory = cells["images/s"], cells["memory"]
        assert (rate.value, memory.value) == (record.images_per_second, record.used_bytes)
        assert record.message in str(cells["ended"])
    found = trouble.found
    assert {trouble.records[i].setting for i in table.marked} == {found.setting}


def test_each_trainers_file_is_there_or_why_not(grid: Run) -> None:
    found = grid.found
    (tabs,) = [p for p in parts_of(run_group(grid, "g"), "trainers") if isinstance(p, Tabs)]
    named = dict(tabs.tabs)
    assert set(named) == set(TARGETS)
    for target in ("pytorch", "accelerate"):
        emitted = emit(found, target)
        copied = {p.label: p.text for p in named[target] if isinstance(p, Copyable)}
        assert copied[emitted.filename] == emitted.text
        assert copied["Launch"] == emitted.launch
        if emitted.code:
            assert copied[emitted.code_filename] == emitted.code
    refused = [p.text for p in named["microsoft"] if hasattr(p, "text")]
    assert "cannot train this setting" in refused[0]
    assert any("autocast" in line for line in refused)


def test_the_command_that_repeats_a_search_has_its_options(grid: Run, tmp_path: Path) -> None:
    asked = kept_options(SearchOptions.of({"restrict": {"precision": "bf16"}, "trials": 9}))
    own = tuple(r.model_copy(update={"probe_id": f"{n}"}) for n, r in enumerate(grid.records))

    def shown(asked: Any) -> list[str]:
        found = grid.found.model_copy(update={"asked": asked})
        return [p.text for p in search_again(replace(grid, found=found, records=own))]  # type: ignore[union-attr]

    options = f"--precision bf16 --trials 9 --output {grid.folder}"
    assert shown(asked)[0] == f"planner tune model.json {options}"
    assert not any("the same options as before" in text for text in shown(asked))
    for unknown in (None, {"colour": "red"}):  # an older planner's result, and a newer one's
        assert shown(unknown)[0] == f"planner tune model.json --output {grid.folder}"
        assert any("the same options as before" in text for text in shown(unknown))


# Endings


def test_nothing_fits(tmp_path: Path) -> None:
    none = [ended(r, "out_of_memory", "CUDA out of memory") for r in invented_table()[:9]]
    run = searched(tmp_path, none)
    assert run.found.setting is None
    said = texts_of(run, "answer")
    assert "none ran within the budget" in said[0]
    assert run.found.advice in said
    assert "trainers" not in [s.key for s in run_group(run, "g").sections]
    assert html_of(run)


@pytest.mark.parametrize("status", ["measured", "crashed"])
def test_one_probe_of_a_run_that_goes_on(status: str) -> None:
    record = make_record(TrainSetting(batch_size=8))
    record = record if status == "measured" else ended(record, status)
    run = Run(Path("run"), None, (record,))
    said = texts_of(run, "answer")[0]
    assert ("best of 1 probe" in said) == (status == "measured")
    keys = [p.key for p in parts_of(run_group(run, "g")) if isinstance(p, Chart)]
    assert ("g-front" in keys) == (status == "measured")
    assert html_of(run)


def test_no_record_at_all(grid: Run) -> None:
    run = replace(grid, found=None, records=(), faults=("probes.jsonl: line 1 is torn",))
    assert texts_of(run)[:2] == [
        "No probe of a step has ended yet.",
        "probes.jsonl: line 1 is torn",
    ]
    assert html_of(run)


# Texts of others


HOSTILE = '<script>alert("1")</script><b>&amp;\x1b[31m\x00'


def test_hostile_texts_are_shown_as_text() -> None:
    model = MODEL.model_copy(update={"name": HOSTILE})
    record = ended(make_record(TrainSetting(batch_size=8), model=model), "crashed", HOSTILE)
    record = record.model_copy(update={"phase": HOSTILE, "versions": {HOSTILE: HOSTILE}})
    good = make_record(TrainSetting(batch_size=4), model=model)
    good = good.model_copy(update={"flags": (HOSTILE,), "unit": HOSTILE})
    run = Run(Path(HOSTILE.replace("/", "").replace("\x00", "")), None, (record, good))
    html = html_of(run)
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert" in html
    assert "\x1b" not in html
