"""Tuners as processes that are killed, and what must hold of the study they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from search.loop.space import make_space, setting_id
from search.loop.study.optuna_study import make_study
from search.loop.study.records import read_records
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
