"""A tuner that has nothing left to probe waits for what others are at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from search.limits import Limits
from search.session import Session
from search.space import make_space
from search.strategies.walks import ListStrategy
from search.study.optuna_study import make_study
from tests.search.tables import GPU, MODEL, SMALL, make_record


@pytest.mark.parametrize("is_lost", [True, False])
def test_it_ends_with_what_the_others_find(tmp_path: Path, is_lost: bool) -> None:
    space = make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(8,))
    here, there = (make_study(str(tmp_path / "a.journal"), tmp_path, space, None) for _ in range(2))
    there.holder = json.dumps(["elsewhere", "", 1, "1"])
    lease = there.lease(space.candidates[0], 60)
    assert lease is not None
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
