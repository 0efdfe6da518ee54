"""Machines at one study: nothing is probed twice, nothing is lost with a machine, all agree."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.search.machines.park import NUM_SETTINGS, SPACE, Park, finish


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


@pytest.mark.workers
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


def test_trials_are_those_of_all_machines(park: Park) -> None:
    tuners = [park.start(host, "--trials", "5", probe=0.2) for host in ("a", "b")]
    for tuner in tuners:
        finish(tuner)
    assert len(park.begun()) == 5
    assert park.check_agreement("a", "b").num_probes == 5


@pytest.mark.workers
def test_other_hardware_is_refused_or_kept_apart(park: Park) -> None:
    finish(park.start("a", "--trials", "1"))
    other = {"gpu": "Another GPU"}
    said = finish(park.start("b", **other), status=1)
    assert "device.name: Test GPU there, Another GPU here" in said
    assert "--study-name" in said
    finish(park.start("b", "--study-name", "another", "--trials", "2", **other))
    assert park.found("b").num_probes == 2
    finish(park.start("c", "--accept-different", "--trials", "3", **other))
    assert park.found("c").num_probes == 3
    assert park.found("a").num_probes == 1


@pytest.mark.parametrize(
    "options",
    [
        f"{SPACE} --strategy planner",
        pytest.param(f"{SPACE} --strategy bounded-grid", marks=pytest.mark.combinations),
        pytest.param(f"{SPACE} --strategy tpe", marks=pytest.mark.combinations),
    ],
)
def test_a_strategy_that_ends_early_ends_alike_everywhere(park: Park, options: str) -> None:
    tuners = [park.start(host, options=options, probe=0.2) for host in ("a", "b")]
    for tuner in tuners:
        finish(tuner)
    park.check_agreement("a", "b")
