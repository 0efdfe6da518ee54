"""SIGKILL at random instants, and two tuners on one study: nothing lost, nothing doubled."""

from __future__ import annotations

from pathlib import Path

import pytest

from search.loop.study.records import read_records
from tests.search.study.tuners import SPACE, check_whole, finish, start, survive


def test_a_tuner_killed_at_a_random_instant_goes_on(tmp_path: Path) -> None:
    survive(tmp_path, 1)


@pytest.mark.release  # Optuna takes a lock of its own that a dead owner holds for 30 s
def test_a_journal_survives_too(tmp_path: Path) -> None:
    survive(tmp_path, 2, str(tmp_path / "study.journal"))


@pytest.mark.release
def test_fifty_instants(tmp_path: Path) -> None:
    """Ten studies, five instants each: one study would soon have nothing left to probe."""
    for n in range(10):
        directory = tmp_path / str(n)
        directory.mkdir()
        survive(directory, 5)


@pytest.mark.release
def test_two_tuners_share_the_work_and_a_third_finds_it_done(tmp_path: Path) -> None:
    tuners = [start(tmp_path), start(tmp_path)]
    found = [finish(t) for t in tuners]
    check_whole(tmp_path, [])
    assert all("recommended" in text for text in found)
    finish(start(tmp_path))  # it probes what the first to end had left to the other, if anything
    records = (tmp_path / "probes.jsonl").read_bytes()
    assert len(read_records(tmp_path / "probes.jsonl").records) == len(SPACE)
    finish(start(tmp_path))
    assert (tmp_path / "probes.jsonl").read_bytes() == records
