"""What the page draws of a search is what the records hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.page.contents import Copyable, Folded, Number, Page, Table, Tabs, Text
from planner.page.rendering import page_html
from planner.schema import DeviceInfo, SwinConfig, TrainSetting
from planner.schema.observation import ObservationRecord
from planner.schema.record import BUDGET_ENDED, Clocks
from planner.schema.world import RankRecord
from planner.trainers.emission import TARGETS, emit
from planner.units import GIB, MIB, format_bytes
from search.asked import kept_options
from search.options import SearchOptions
from search.report.again import REPLAY, search_again
from search.report.group import run_group
from search.report.run import Run
from search.report.spent import spent_seconds
from search.report.wording import ENDS, rate_text
from search.result.contenders import contenders, pareto_front
from tests.search.report.runs import (
    GRID,
    chart_of,
    ended,
    parts_of,
    recorded,
    searched,
    table_of,
    texts_of,
    traces_of,
    troubled,
)
from tests.search.tables import GPU, MODEL, invented_table, make_record

FRONT, ORDER = "-front-1", "-order"


def html_of(run: Run) -> str:
    return page_html(Page("a run", "", [run_group(run, "g")]))


def points(traces: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Of probes with a rate: (x, y), rounded as plotly's JSON need not be."""
    drawn = [
        (x, y) for t in traces if t["mode"] == "markers" and t.get("yaxis") != "y2"
        for x, y in zip(t["x"], t["y"], strict=True)
    ]  # fmt: skip
    return sorted((round(x, 6), round(y, 6)) for x, y in drawn)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return troubled(tmp_path_factory.mktemp("trouble"))


def test_the_answer_says_setting_rate_memory_budget_and_gain(grid: Run) -> None:
    found = grid.found
    assert found is not None
    assert found.evidence is not None
    said = texts_of(grid, "answer")[0]
    assert "batch 128, bf16, adamw" in said
    assert rate_text(found.evidence.images_per_second) in said
    assert format_bytes(found.evidence.used_bytes or 0) in said
    assert f"of the {format_bytes(grid.budget_bytes or 0)} allowed" in said
    assert f"{found.gain:.2f} × the plain default's" in said


@pytest.mark.parametrize("name", ["grid", "trouble"])
def test_every_measured_probe_is_a_point(name: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(name)
    unit = GIB if "GiB" in json.dumps(chart_of(run, FRONT).figure.to_plotly_json()["layout"],
                                      default=str) else MIB  # fmt: skip
    measured = [r for r in run.records if r.status == "measured"]
    expected = sorted(
        (round((r.used_bytes or 0) / unit, 6), round(r.images_per_second or 0, 6)) for r in measured
    )
    assert points(traces_of(run, FRONT)) == expected
    assert len(expected) > 5


@pytest.mark.parametrize("name", ["grid", "trouble"])
def test_the_front_is_the_pareto_front(name: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(name)
    front = pareto_front(contenders(run.records, run.budget_bytes))
    line = next(t for t in traces_of(run, FRONT) if t["name"] == "front")
    assert list(line["y"]) == [c.rate for c in front]
    xs = list(line["x"])
    assert xs == pytest.approx([(c.num_bytes or 0) * xs[0] / (front[0].num_bytes or 1)
                                for c in front])  # fmt: skip


def test_the_budget_is_a_line_with_its_far_side_shaded(trouble: Run) -> None:
    layout = chart_of(trouble, FRONT).figure.to_plotly_json()["layout"]
    shaded, line = layout["shapes"]
    at = (trouble.budget_bytes or 0) / GIB
    assert line["x0"] == line["x1"] == shaded["x0"] == pytest.approx(at)
    assert shaded["x1"] == layout["xaxis"]["range"][1] > at
    assert format_bytes(trouble.budget_bytes or 0) in layout["annotations"][0]["text"]


def test_a_budget_far_away_is_told_and_not_drawn(grid: Run) -> None:
    assert not chart_of(grid, FRONT).figure.to_plotly_json()["layout"].get("shapes")
    assert any("lies far to the right" in text for text in texts_of(grid, "front"))


def test_the_recommended_and_the_plain_default_are_named(grid: Run) -> None:
    traces = {t["name"]: t for t in traces_of(grid, FRONT)}
    found = grid.found
    assert found is not None
    assert found.evidence is not None
    assert found.baseline is not None
    assert traces["recommended"]["text"] == ["recommended"]
    assert list(traces["recommended"]["y"]) == [found.evidence.images_per_second]
    assert list(traces["plain default"]["y"]) == [found.baseline.images_per_second]
    symbols = [traces[n]["marker"]["symbol"] for n in ("recommended", "plain default")]
    assert len(set(symbols)) == 2


def test_failures_stand_in_a_strip_by_their_kind(trouble: Run) -> None:
    ends: dict[str, int] = {}
    for record in trouble.records:
        if record.status != "measured":
            ends[ENDS[record.status]] = ends.get(ENDS[record.status], 0) + 1
    strip = [t for t in traces_of(trouble, FRONT) if t.get("yaxis") == "y2"]
    assert {t["name"]: len(t["x"]) for t in strip} == ends
    assert set(ends) == {"out of memory", "crashed", "out of time", "not supported", "not finite"}
    order = {t["name"]: t for t in traces_of(trouble, ORDER)}
    for end, number in ends.items():
        assert len(order[end]["x"]) == number


def test_a_failure_whose_memory_is_not_known_stands_left_of_nothing(trouble: Run) -> None:
    unknown = replace(trouble, records=tuple(r.model_copy(update={"expected": None})
                                             for r in trouble.records))  # fmt: skip
    strip = [t for t in traces_of(unknown, FRONT) if t.get("yaxis") == "y2"]
    assert all(x < 0 for t in strip for x in t["x"])
    layout = chart_of(unknown, FRONT).figure.to_plotly_json()["layout"]
    assert layout["xaxis"]["range"][0] < 0
    assert any("not known" in a["text"] for a in layout["annotations"])


def test_probes_are_drawn_in_order_with_the_fastest_so_far(trouble: Run) -> None:
    best: list[float | None] = []
    for record in trouble.records:
        ok = record.status == "measured" and (record.used_bytes or 0) <= (trouble.budget_bytes or 0)
        rates = [b for b in (*best[-1:], record.images_per_second if ok else None) if b]
        best.append(max(rates, default=None))
    line = next(t for t in traces_of(trouble, ORDER) if t["name"] == "fastest so far")
    assert list(line["y"]) == best
    assert line["line"]["shape"] == "hv"
    drawn = [n for t in traces_of(trouble, ORDER)
             if t["mode"] == "markers" and t["name"] != "expected" for n in t["x"]]  # fmt: skip
    assert sorted(drawn) == list(range(1, len(trouble.records) + 1))


def test_the_table_has_every_probe_with_its_reason(trouble: Run) -> None:
    table = table_of(trouble, "probes")
    assert len(table.rows) == len(trouble.records)
    for number, (row, record) in enumerate(zip(table.rows, trouble.records, strict=True), start=1):
        cells = dict(zip(table.headers, row, strict=True))
        assert cells["probe"] == Number(number, str(number))
        rate, memory = cells["images/s"], cells["memory"]
        assert isinstance(rate, Number)
        assert isinstance(memory, Number)
        assert (rate.value, memory.value) == (record.images_per_second, record.used_bytes)
        assert record.message in str(cells["ended"])
    found = trouble.found
    assert found is not None
    assert {trouble.records[i].setting for i in table.marked} == {found.setting}


def test_the_time_of_the_probes_is_all_accounted_for(trouble: Run) -> None:
    spent = spent_seconds(trouble.records)
    assert sum(spent.values()) == pytest.approx(sum(r.probe_seconds for r in trouble.records))
    failed = [r.probe_seconds for r in trouble.records if r.status != "measured"]
    assert spent["probes that did not end well"] == pytest.approx(sum(failed))
    drawn = {t["name"]: t["x"][0] for t in traces_of(trouble, "-spent")}
    assert drawn == pytest.approx({what: s for what, s in spent.items() if s > 0})


def test_each_trainers_file_is_there_or_why_not(grid: Run) -> None:
    found = grid.found
    assert found is not None
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


def test_the_launch_line_writes_the_file_it_starts(grid: Run) -> None:
    copied = [p.text for p in parts_of(run_group(grid, "g"), "answer") if isinstance(p, Copyable)]
    assert copied == [
        f"planner emit {grid.folder} --for pytorch --output train.py\npython train.py DATA"
    ]


def test_the_reasons_hold_the_notes_the_runners_up_and_what_was_ruled_out(trouble: Run) -> None:
    found = trouble.found
    assert found is not None
    assert set(found.notes) <= set(texts_of(trouble, "reasons"))
    table = table_of(trouble, "reasons")
    held = [found.evidence, *found.runners_up]
    if found.baseline not in held:
        held.append(found.baseline)
    assert [row[2].value for row in table.rows if isinstance(row[2], Number)] == [
        r.images_per_second for r in held if r
    ]


def test_each_rank_is_shown_by_itself(grid: Run) -> None:
    ranks = (
        RankRecord(rank=0, device="cuda:0", step_seconds=0.5, forward_seconds=0.1,
                   peak_allocated_bytes=GIB, peak_reserved_bytes=2 * GIB, device_bytes=3 * GIB),
        RankRecord(rank=1, device="cuda:1", step_seconds=0.5),
    )  # fmt: skip
    first, *others = grid.records
    run = replace(grid, records=(first.model_copy(update={"ranks": ranks}), *others))
    (table,) = [p for p in parts_of(run_group(run, "g"), "probes")
                if isinstance(p, Table) and "rank" in p.headers]  # fmt: skip
    texts = [[c.text if isinstance(c, Number) else c for c in row] for row in table.rows]
    assert texts == [
        ["1", "0", "cuda:0", "500 ms", "100 ms", "1.00 GiB", "2.00 GiB", "3.00 GiB"],
        ["1", "1", "cuda:1", "500 ms", "-", "-", "-", "-"],
    ]
    folds = [p.summary for p in parts_of(run_group(grid, "g"), "probes") if isinstance(p, Folded)]
    assert "Each rank by itself" not in folds, "its probes have one rank"


def test_clocks_are_drawn_where_they_were_read(grid: Run) -> None:
    hot = Clocks(sm_mhz=1200, temperature_c=80, power_watts=300.0, throttle_reasons=("thermal",))
    cool = Clocks(sm_mhz=1400, temperature_c=60, power_watts=250.0)
    changed = [
        r.model_copy(update={"clocks": hot if i == 1 else cool, "flags": ("throttled: thermal",) *
                             (i == 1)}) for i, r in enumerate(grid.records)
    ]  # fmt: skip
    run = replace(grid, records=tuple(changed))
    traces = {t["name"]: t for t in traces_of(run, "-clocks")}
    assert list(traces["SM clock, MHz"]["y"])[:3] == [1400, 1200, 1400]
    assert list(traces["throttled"]["x"]) == [2]
    assert any("1 probe was disturbed: throttled (1)" in t for t in texts_of(run, "environment"))
    keys = [p.key for p in parts_of(run_group(grid, "g")) if hasattr(p, "figure")]
    assert not any(key.endswith("-clocks") for key in keys), "nothing was read on that CPU"


def test_the_search_is_repeated_by_its_model(grid: Run, tmp_path: Path) -> None:
    copied = {p.label: p.text for p in search_again(grid) if isinstance(p, Copyable)}
    again = SwinConfig.model_validate_json(copied["model.json"])
    assert grid.found is not None
    assert again == grid.found.model, "a grid's model has no name that says it"
    assert copied["Search on a device"] == "planner tune model.json", (
        "its probes are no search's own"
    )
    assert copied[REPLAY] == f"planner tune --replay {GRID} --output {grid.folder}"
    own = tuple(r.model_copy(update={"probe_id": f"{n}"}) for n, r in enumerate(grid.records))
    measured = replace(grid, records=own)
    copied = {p.label: p.text for p in search_again(measured) if isinstance(p, Copyable)}
    assert copied["Search again"] == f"planner tune model.json --output {grid.folder}"


def test_the_command_that_repeats_a_search_has_its_options(grid: Run, tmp_path: Path) -> None:
    assert grid.found is not None
    asked = kept_options(SearchOptions.of({"restrict": {"precision": "bf16"}, "trials": 9}))
    own = tuple(r.model_copy(update={"probe_id": f"{n}"}) for n, r in enumerate(grid.records))

    def shown(asked: Any) -> list[str]:
        assert grid.found is not None
        found = grid.found.model_copy(update={"asked": asked})
        return [p.text for p in search_again(replace(grid, found=found, records=own))]  # type: ignore[union-attr]

    options = f"--precision bf16 --trials 9 --output {grid.folder}"
    assert shown(asked)[0] == f"planner tune model.json {options}"
    assert not any("the same options as before" in text for text in shown(asked))
    for unknown in (None, {"colour": "red"}):  # an older planner's result, and a newer one's
        assert shown(unknown)[0] == f"planner tune model.json --output {grid.folder}"
        assert any("the same options as before" in text for text in shown(unknown))


def test_a_password_that_is_not_kept_is_asked_for(grid: Run) -> None:
    own = tuple(r.model_copy(update={"probe_id": f"{n}"}) for n, r in enumerate(grid.records))
    asked = kept_options(SearchOptions.of({"storage": "postgresql://me:secret@db/x"}))
    assert grid.found is not None
    found = grid.found.model_copy(update={"asked": asked})
    shown, _, note, _ = search_again(replace(grid, found=found, records=own))
    assert isinstance(shown, Copyable)
    assert "--storage 'postgresql://me:***@db/x'" in shown.text
    assert isinstance(note, Text)
    assert "the study in that storage" in note.text
    assert "in full: its password is not kept" in note.text


def test_a_replay_of_no_probe_goes_on_from_no_study(grid: Run) -> None:
    """Its records do not say that they are a replay's where there are none."""
    copied = [p.label for p in search_again(replace(grid, records=())) if isinstance(p, Copyable)]
    assert "Search again" not in copied
    assert {"Search on a device", REPLAY} < {*copied}


def test_who_probed_is_said_where_several_did(trouble: Run) -> None:
    ids = [r.probe_id for r in trouble.records]
    who = {probe_id: f"tuner {1 + i % 2}" for i, probe_id in enumerate(ids)}
    run = replace(trouble, tuners=who)
    assert any("2 tuners shared the search" in text for text in texts_of(run, "probes"))
    table = table_of(run, "probes")
    assert [row[-1] for row in table.rows] == list(who.values())
    assert "tuner" not in table_of(trouble, "probes").headers


# Endings


def test_nothing_fits(tmp_path: Path) -> None:
    none = [ended(r, "out_of_memory", "CUDA out of memory") for r in invented_table()]
    run = searched(tmp_path, none)
    assert run.found is not None
    assert run.found.setting is None
    said = texts_of(run, "answer")
    assert "none ran within the budget" in said[0]
    assert run.found.advice in said
    assert "trainers" not in [s.key for s in run_group(run, "g").sections]
    assert html_of(run)


def test_all_crashed(tmp_path: Path) -> None:
    run = searched(tmp_path, [ended(r, "crashed", "it broke") for r in invented_table()])
    assert any("No probe measured a rate" in text for text in texts_of(run, "front"))
    assert html_of(run)


@pytest.mark.parametrize("status", ["measured", "crashed", "out_of_memory"])
def test_one_probe_of_a_run_that_goes_on(status: str) -> None:
    record = make_record(TrainSetting(batch_size=8))
    record = record if status == "measured" else ended(record, status)
    run = Run(Path("run"), None, (record,))
    said = texts_of(run, "answer")[0]
    assert ("best of 1 probe" in said) == (status == "measured")
    names = {t["name"] for t in traces_of(run, FRONT)}
    assert ("best so far" in names) == (status == "measured")
    assert html_of(run)


def test_no_record_at_all(grid: Run) -> None:
    run = replace(grid, found=None, records=(), faults=("probes.jsonl: line 1 is torn",))
    assert texts_of(run)[:2] == [
        "No probe of a step has ended yet.",
        "probes.jsonl: line 1 is torn",
    ]
    assert html_of(run)


def test_probes_that_say_nothing_of_their_setting_are_told_apart() -> None:
    cut = ended(make_record(TrainSetting(batch_size=8)), "timed_out")
    cut = cut.model_copy(update={"flags": (BUDGET_ENDED,)})
    crowded = ended(make_record(TrainSetting(batch_size=16)), "out_of_memory")
    crowded = crowded.model_copy(
        update={"free_bytes": GIB, "allowed_bytes": 12 * GIB, "taken_bytes": 0}
    )
    run = Run(Path("run"), None, (cut, crowded))
    cells = [row[table_of(run, "probes").headers.index("ended")] for row in
             table_of(run, "probes").rows]  # fmt: skip
    assert cells == ["cut short by the budget", "held up by others"]


def test_several_models_have_a_chart_each() -> None:
    other = MODEL.model_copy(update={"name": "other"})
    records = (make_record(TrainSetting(batch_size=4)),
               make_record(TrainSetting(batch_size=8), model=other))  # fmt: skip
    run = Run(Path("validation.jsonl"), None, records)
    assert traces_of(run, "-front-1") != traces_of(run, "-front-2")
    assert "native:other" in table_of(run, "probes").rows[1]
    assert "no setting" not in texts_of(run)[0]
    assert html_of(run)


def test_several_devices_are_told_apart() -> None:
    second = DeviceInfo(kind="cuda", name="Another GPU", total_bytes=24 * GIB)
    records = [make_record(TrainSetting(batch_size=4), device=d) for d in (GPU, second)]
    run = Run(Path("validation.jsonl"), None, tuple(records))
    assert any("several environments" in text for text in texts_of(run, "environment"))


@pytest.mark.parametrize("number", [200, pytest.param(5000, marks=pytest.mark.repeated)])
def test_however_many_probes_are_all_shown_and_the_page_is_small(grid: Run, number: int) -> None:
    many = tuple(
        r.model_copy(update={"probe_id": f"{n}"})
        for n, r in zip(range(number), [*invented_table()] * 200, strict=False)
    )
    run = replace(grid, found=None, records=many)
    table = table_of(run, "probes")
    assert len(table.rows) == number
    measured = sum(r.status == "measured" for r in many)
    assert len(points(traces_of(run, FRONT))) == measured
    assert len(html_of(run)) < 5e6


def test_what_was_seen_of_a_device_is_listed() -> None:
    found = ObservationRecord(
        observation="first", see="near-limit", what="how it fails", device=GPU, versions={},
        date="2026-01-01T00:00:00+00:00", status="seen", message=HOSTILE, figures={"bytes": 5},
    )  # fmt: skip
    run = Run(Path("first.jsonl"), None, (), observations=(found,))
    assert [section.key for section in run_group(run, "g").sections] == ["seen"]
    (row,) = table_of(run, "seen").rows
    assert row[0] == "how it fails"
    assert "bytes 5" in str(row[3])
    assert "<script>alert" not in html_of(run)


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
    for key in (FRONT, ORDER):
        figure = json.dumps(chart_of(run, key).figure.to_plotly_json(), default=str)
        assert "<script" not in figure
        assert "<b>" not in figure


def test_a_long_message_is_shortened_and_whole_below() -> None:
    long = "because " * 12_800
    record = ended(make_record(TrainSetting(batch_size=8)), "crashed", long)
    run = Run(Path("run"), None, (record, record, make_record(TrainSetting(batch_size=4))))
    table = table_of(run, "probes")
    assert all(len(str(cell)) < 300 for row in table.rows for cell in row)
    folds = [p for p in parts_of(run_group(run, "g"), "probes") if isinstance(p, Folded)]
    (whole,) = folds[-1].parts
    assert isinstance(whole, Copyable)
    assert whole.text == long
    assert whole.label == "probe 1, 2"


def test_very_many_long_messages_do_not_fill_the_page() -> None:
    records = tuple(
        ended(make_record(TrainSetting(batch_size=8)), "crashed", f"{n} " * 20_000)
        for n in range(100)
    )
    html = html_of(Run(Path("run"), None, records))
    assert len(html) < 5e6
