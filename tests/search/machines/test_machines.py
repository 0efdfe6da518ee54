"""Machines at one study: nothing is probed twice, nothing is lost with a machine, all agree."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from search.loop.limits import Limits
from search.loop.session import Session
from search.loop.space import make_space
from search.loop.strategies.in_order import ListStrategy
from search.loop.study.optuna_study import make_study
from tests.search.machines.park import NUM_SETTINGS, SPACE, Park, finish
from tests.search.tables import GPU, MODEL, SMALL, make_record


@pytest.fixture
def park(tmp_path: Path) -> Iterator[Park]:
    found = Park(tmp_path)
    yield found
    found.close()


def test_three_machines_share_a_journal_and_agree(park: Park) -> None:
    """The third comes when the others are at work; their clocks are an hour and a day apart."""
    tuners = [park.start("a", probe=0.15), park.start("b", probe=0.15, clock=-3600)]
    park.wait_for(2)
    tuners.append(park.start("c", probe=0.15, clock=86400))
    for tuner in tuners:
        assert "Recommended" in finish(tuner)
    assert set(park.times_begun().values()) == {1}
    assert len(park.begun()) == NUM_SETTINGS
    assert park.check_agreement("a", "b", "c").num_probes == NUM_SETTINGS


@pytest.mark.release
def test_what_a_lost_machine_was_at_is_probed_by_another(park: Park) -> None:
    """Its whole group of processes is killed in a probe; only its lease tells the others."""
    lost = park.start("lost", probe=3600, lease=5)
    park.wait_for(1)
    os.killpg(lost.pid, signal.SIGKILL)
    finish(park.start("here"))
    settings = park.times_begun()
    assert park.begun()[0][0] == "lost"
    assert settings[park.begun()[0][1]] == 2
    assert len(settings) == NUM_SETTINGS
    assert sum(settings.values()) == NUM_SETTINGS + 1
    assert park.found("here").num_probes == NUM_SETTINGS


@pytest.mark.release
def test_trials_are_those_of_all_machines(park: Park) -> None:
    tuners = [park.start(host, "--trials", "5", probe=0.2) for host in ("a", "b")]
    for tuner in tuners:
        finish(tuner)
    assert len(park.begun()) == 5
    assert park.check_agreement("a", "b").num_probes == 5


@pytest.mark.release
@pytest.mark.parametrize("options", [f"{SPACE} --strategy planner", f"{SPACE} --strategy tpe"])
def test_a_strategy_that_ends_early_ends_alike_everywhere(park: Park, options: str) -> None:
    tuners = [park.start(host, options=options, probe=0.2) for host in ("a", "b")]
    for tuner in tuners:
        finish(tuner)
    park.check_agreement("a", "b")


@pytest.mark.parametrize("is_lost", [True, False])
def test_it_ends_with_what_the_others_find(tmp_path: Path, is_lost: bool) -> None:
    space = make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(8,))
    here, there = (make_study(str(tmp_path / "a.journal"), tmp_path, space, None) for _ in range(2))
    there.holder = json.dumps(["elsewhere", "", 1, "1"])
    lease = there.lease(space.candidates[0], 60)
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if is_lost:
            there.release(lease, "its lease is over")
        else:
            there.finish(lease, make_record(lease.candidate.setting, probe_id=lease.probe_id))

    session = Session(
        space, here, lambda choice, *_: make_record(choice.candidate.setting), Limits(),
        lambda choice: 60.0, None, sleep=sleep,
    )  # fmt: skip
    session.run(ListStrategy(space.candidates))
    assert len(waited) == 1
    assert len(session.records) == len(space)
    assert (lease.probe_id in session.seen) != is_lost
