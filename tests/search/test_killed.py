"""SIGKILL at random instants, and two tuners on one study: nothing lost, nothing doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from search.space import make_space, setting_id
from search.study.records import read_records
from search.study.study import make_study
from tests.search.tables import GPU, MODEL
from tests.search.tuner import BATCHES, RESTRICT

SPACE = make_space(MODEL, GPU, restrict=RESTRICT, batch_sizes=BATCHES)


def start(directory: Path, storage: str | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.search.tuner", str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *([storage] if storage else [])], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment,
    )  # fmt: skip


def finish(tuner: subprocess.Popen[str]) -> str:
    out, err = tuner.communicate(timeout=120)
    assert tuner.returncode == 0, err
    return out


def kill_at_a_random_instant(directory: Path, random: Random, storage: str | None) -> None:
    """Lets a tuner get to work, then kills it and its probe within the next moments."""
    recorded = len(read_records(directory / "probes.jsonl").records)
    tuner = start(directory, storage)
    patience = time.monotonic() + 60
    while tuner.poll() is None and time.monotonic() < patience:
        if len(read_records(directory / "probes.jsonl").records) > recorded:
            break
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.15))
    if tuner.poll() is None:
        os.killpg(tuner.pid, signal.SIGKILL)
    tuner.communicate()


def check_whole(directory: Path, before: list[str], storage: str | None = None) -> None:
    """Every setting has one record, in the file and in the study; the earlier ones are there."""
    file = read_records(directory / "probes.jsonl")
    assert file.fault == ""
    ids = [r.probe_id for r in file.records]
    assert len(set(ids)) == len(ids)
    settings = [setting_id(r.setting) for r in file.records]
    assert len(set(settings)) == len(settings)
    assert set(before) <= set(ids)
    study = make_study(storage, directory, SPACE, None)
    assert sorted(r.probe_id for r in study.records()) == sorted(ids)


def survive(directory: Path, instants: int, storage: str | None = None) -> None:
    random = Random(instants)
    for _ in range(instants):
        before = [r.probe_id for r in read_records(directory / "probes.jsonl").records]
        kill_at_a_random_instant(directory, random, storage)
        after = [r.probe_id for r in read_records(directory / "probes.jsonl").records]
        assert after[: len(before)] == before
    before = [r.probe_id for r in read_records(directory / "probes.jsonl").records]
    finish(start(directory, storage))
    check_whole(directory, before, storage)
    closed = {r.setting for r in read_records(directory / "probes.jsonl").records}
    assert closed == {c.setting for c in SPACE.candidates}


def test_a_tuner_killed_at_random_instants_goes_on(tmp_path: Path) -> None:
    survive(tmp_path, 5)


@pytest.mark.long  # Optuna takes a lock of its own that a dead owner holds for 30 s
def test_a_journal_survives_too(tmp_path: Path) -> None:
    survive(tmp_path, 2, str(tmp_path / "study.journal"))


@pytest.mark.long
def test_fifty_instants(tmp_path: Path) -> None:
    """Ten studies, five instants each: one study would soon have nothing left to probe."""
    for n in range(10):
        directory = tmp_path / str(n)
        directory.mkdir()
        survive(directory, 5)


def test_two_tuners_share_the_work(tmp_path: Path) -> None:
    tuners = [start(tmp_path), start(tmp_path)]
    said = [finish(t) for t in tuners]
    check_whole(tmp_path, [])
    assert all("recommended" in s for s in said)
    finish(start(tmp_path))
    assert len(read_records(tmp_path / "probes.jsonl").records) == len(SPACE)


def test_a_finished_study_is_not_probed_again(tmp_path: Path) -> None:
    first = finish(start(tmp_path))
    before = (tmp_path / "probes.jsonl").read_bytes()
    assert finish(start(tmp_path)) == first
    assert (tmp_path / "probes.jsonl").read_bytes() == before
