"""tune() over an invented device, interrupted, and with nothing that fits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import PlannerError, UsageError
from planner.core.schema import MeasurementRecord, TrainSetting
from planner.core.schema.record import BUDGET_ENDED, Recommendation
from planner.core.units import GIB
from planner.memory.allocator_config import VARIABLES
from search.loop.records import read_records
from search.loop.search import Limits
from search.loop.space import Pick, make_space
from search.loop.study import StudyIdentity
from search.probe.device import versions, worker_environment
from search.probe.parent import probe_environment
from search.probe.protocol import CONTRACT
from search.tuning import tune as tune_file
from search.tuning.tune import tune
from tests.search.replays import Replay, search_table
from tests.search.tables import (
    BUDGET,
    GPU,
    MODEL,
    SMALL,
    failed,
    invented_table,
    make_record,
    true_prior,
)

TABLE = invented_table()
pytestmark = pytest.mark.usefixtures("gpu")


def probe(pick: Pick, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
    return make_record(pick.candidate.setting, total_bytes=14 * GIB)


def run(tmp_path: Path, **options: object) -> Recommendation:
    given: dict[str, object] = {"output": tmp_path, "restrict": SMALL, "estimator": None,
                                "prober": probe, "batch_size": (8, 16, 32, 64, 128)}  # fmt: skip
    return tune(MODEL, **{**given, **options})  # type: ignore[arg-type]


def test_it_recommends_what_it_ran(tmp_path: Path) -> None:
    found = run(tmp_path)
    records = read_records(tmp_path / "probes.jsonl").records
    assert found.setting in {r.setting for r in records}
    assert found.num_probes == len(records)
    assert found.gain > 1.5
    assert json.loads((tmp_path / "recommendation.json").read_text())["status"] == "recommended"
    assert any("Other processes hold 2.00 GiB" in note for note in found.notes)


def test_an_emulation_says_so(tmp_path: Path) -> None:
    found = run(tmp_path, memory_bytes=6 * GIB)
    assert any("a smaller device" in note for note in found.notes)
    assert ((found.evidence and found.evidence.device_bytes) or 0) <= 6 * GIB * 0.95
    with pytest.raises(UsageError, match="no memory is left"):
        run(tmp_path, memory_bytes=1)


def test_a_global_batch_is_held_and_trials_count_over_resumption(tmp_path: Path) -> None:
    for _ in range(2):
        found = run(tmp_path, global_batch=64, batch_size=None, trials=3)
        assert found.num_probes == 3
    assert {r.setting.global_batch for r in read_records(tmp_path / "probes.jsonl").records} == {64}
    assert not any("learning rate" in note for note in found.notes)


def test_an_interrupt_ends_with_the_best_so_far(tmp_path: Path) -> None:
    calls = []

    def interrupted(pick: Pick, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        calls.append(pick)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return probe(pick, probe_id, deadline_seconds)

    found = run(tmp_path, prober=interrupted)
    assert found.status == "recommended"
    assert found.stopped_because == "it was interrupted"
    assert found.num_probes == 2
    again = run(tmp_path)  # the interrupted setting is free again
    assert again.num_probes > found.num_probes
    settings = [r.setting for r in read_records(tmp_path / "probes.jsonl").records]
    assert calls[2].candidate.setting in settings


def test_the_same_failure_three_times_ends_it(tmp_path: Path) -> None:
    def crashing(*asked: Any) -> MeasurementRecord:
        return failed(probe(*asked), message="RuntimeError: the factory raised")

    found = run(tmp_path, prober=crashing)
    assert found.num_probes == 3
    assert "RuntimeError: the factory raised" in found.advice


def test_a_machine_that_can_start_no_probe_is_said_and_no_storage_is_blamed(tmp_path: Path) -> None:
    def crowded(*_: Any) -> MeasurementRecord:
        raise OSError(24, "Too many open files")

    with pytest.raises(PlannerError, match="no probe can be run: Too many open files"):
        run(tmp_path, prober=crowded)


def test_a_contract_that_some_settings_break_ends_no_search(tmp_path: Path) -> None:
    """As a batch that is larger than the user's data: others were measured. (Where none was, it
    ends the search: tests/tasks/test_tune.py.)"""
    calls: list[Pick] = []

    def sometimes(pick: Pick, *more: Any) -> MeasurementRecord:
        done = probe(pick, *more)
        calls.append(pick)
        return failed(done, "unsupported", phase=CONTRACT) if len(calls) == 2 else done

    found = run(tmp_path, prober=sometimes)
    assert found.status == "recommended"
    assert found.num_probes == len(calls) > 2


def test_a_probe_may_not_outlast_the_budget(tmp_path: Path) -> None:
    deadlines = []

    def endless(pick: Pick, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        deadlines.append(deadline_seconds)
        done = probe(pick, probe_id, deadline_seconds)
        return done if len(deadlines) == 1 else failed(done, "timed_out")

    found = run(tmp_path, prober=endless, budget_seconds=90.0, trials=2)
    assert found.status == "recommended"
    assert all(seconds <= 90 for seconds in deadlines), "hung is later than that"
    first, second = read_records(tmp_path / "probes.jsonl").records
    assert BUDGET_ENDED not in first.flags
    assert BUDGET_ENDED in second.flags


def test_a_short_budget_begins_with_what_is_surely_measured(tmp_path: Path) -> None:
    """On a busy machine, where a step of four images outlasts the budget."""

    def busy(pick: Pick, *more: Any) -> MeasurementRecord:
        done = probe(pick, *more)
        return done if pick.candidate.setting.batch_size <= 2 else failed(done, "timed_out")

    found = run(tmp_path, prober=busy, budget_seconds=60.0, trials=1, batch_size=None)
    assert found.status == "recommended"
    assert found.baseline is not None
    assert found.baseline.setting.batch_size <= 2
    assert found.gain is None, "at that batch nobody would train"


def test_half_of_a_budget_is_for_probes() -> None:
    now = 0.0
    limits = Limits(budget_seconds=60.0, clock=lambda: now)
    for at, begins, left in ((20.0, True, 40.0), (50.0, True, 30.0), (70.0, False, 10.0)):
        now = at
        if begins:
            limits.begin_probing()
        assert limits.seconds_left() == left


def test_what_the_budget_cut_short_is_probed_with_more_time(tmp_path: Path) -> None:
    def cut(*asked: Any) -> MeasurementRecord:
        return failed(probe(*asked), "timed_out")

    one = {axis: values[-1:] for axis, values in SMALL.items()}
    given = {"batch_size": 8, "restrict": {**one, "compile": ("off",)}}
    nothing = run(tmp_path, prober=cut, budget_seconds=60.0, trials=1, **given)
    assert nothing.status == "nothing_fits"
    assert "--budget" in nothing.advice
    found = run(tmp_path, budget_seconds=None, **given)
    first, second = read_records(tmp_path / "probes.jsonl").records
    assert first.cut_short
    assert first.setting == second.setting == found.setting


@pytest.mark.parametrize(("budget", "tried"), [(40.0, False), (600.0, True)])
def test_a_mode_that_the_budget_ended_before_is_named(
    tmp_path: Path, budget: float, tried: bool
) -> None:
    replay, prior = Replay(TABLE), true_prior(Replay(TABLE))
    search, stopped = search_table(replay, prior, BUDGET, budget_seconds=budget)
    identity = StudyIdentity(model=MODEL, device=GPU, versions={})
    notes = search.recommend(identity, stopped, []).notes
    said = [note for note in notes if "compiling takes long and the budget ended" in note]
    assert bool(said) == (not tried)
    assert all("default (about " in note for note in said)


def test_the_tuner_imports_no_torch() -> None:
    script = (
        "import sys, search.probe.parent, search.tuning.tune, search.loop.search;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_it_begins_where_it_is_told_to(tmp_path: Path) -> None:
    """Also in a study that knows other values; what is asked for by name wins."""
    run(tmp_path, trials=2)
    start = {"batch_size": 24, "precision": "bf16", "checkpointing": "blocks", "compile": "off"}
    found = run(tmp_path, start=start, batch_size=None, trials=3)
    third = read_records(tmp_path / "probes.jsonl").records[2].setting
    assert {field: getattr(third, field) for field in start} == start
    assert found.asked is not None
    assert found.asked["start"] == {"batch_size": 24, "checkpointing": "blocks"}
    run(tmp_path, start={**start, "batch_size": 48, "attention": "eager"}, trials=4)
    fourth = read_records(tmp_path / "probes.jsonl").records[3].setting
    assert (fourth.batch_size, fourth.attention) == (32, "sdpa")
    space = make_space(MODEL, GPU, start=TrainSetting(checkpointing="blocks:6", batch_size=40))
    assert space.first is not None
    assert space.first.setting.checkpointing == "blocks:6"
    assert 40 in {c.setting.batch_size for c in space.candidates}


def test_probes_run_under_the_allocator_that_is_said_and_a_study_does_not_mix_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, options = "max_split_size_mb:64", "expandable_segments:True"
    monkeypatch.setattr(tune_file, "versions", versions)
    monkeypatch.setenv(VARIABLES[0], here)
    heard: list[tuple[str, str]] = []

    def probing(*asked: Any) -> MeasurementRecord:
        heard.append((probe_environment()[VARIABLES[0]], ""))
        return probe(*asked).model_copy(update={"versions": versions()})

    def asked(**more: object) -> Recommendation:
        hear = lambda progress: heard.append(("", progress.text))  # noqa: E731
        return run(tmp_path, prober=probing, on_progress=hear, batch_size=(8, 16), **more)

    found = asked(allocator=options)
    assert found.evidence.versions["allocator_config"] == options
    assert {told for told, _ in heard} == {"", options}
    assert any(f"the allocator's options {options}" in text for _, text in heard)
    assert (os.environ[VARIABLES[0]], os.environ.get(VARIABLES[1])) == (here, None)
    assert worker_environment()[VARIABLES[0]] == here
    with pytest.raises(PlannerError, match="allocator_config"):
        asked()
    heard.clear()
    asked(accept_different=True)
    assert any("allocator_config" in text for _, text in heard)


def test_where_nobody_says_otherwise_segments_are_expandable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device, build in (("cuda:0", "13.0"), ("cpu", "13.0"), ("cuda:0", "rocm6.4"),
                          ("cuda:0", None)):  # fmt: skip
        monkeypatch.setattr(tune_file, "installed_build", lambda build=build: build)
        options, said = tune_file.usual_options(device)
        is_cuda = (device, build) == ("cuda:0", "13.0")
        assert options == ("expandable_segments:True" if is_cuda else None)
        assert ["--allocator expandable_segments:False" in text for text in said] == [
            True
        ] * is_cuda
    monkeypatch.setenv(VARIABLES[1], "")
    monkeypatch.setattr(tune_file, "installed_build", lambda: "13.0")
    assert tune_file.usual_options("cuda:0") == (None, []), "set to nothing, torch has its own way"
