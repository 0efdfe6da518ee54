"""A study in a database server, shared by tuners: the same laws as in a file.

PLANNER_TEST_POSTGRESQL and PLANNER_TEST_MYSQL name an empty database each, by URL; without them
these tests are skipped. Last run: PostgreSQL 15 (psycopg 3.3) and MariaDB 10.11 (PyMySQL 1.2),
2026-11-20.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import optuna
import pytest

from search.study.optuna_study import make_study
from search.study.records import read_records
from tests.search.study.tuners import SPACE, check_whole, finish, start, survive
from tests.search.tables import make_record

SERVERS = {
    "postgresql": os.environ.get("PLANNER_TEST_POSTGRESQL"),
    "mysql": os.environ.get("PLANNER_TEST_MYSQL"),
}
pytestmark = pytest.mark.servers


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> str:
    url = SERVERS[request.param]
    if url is None:
        pytest.skip(f"PLANNER_TEST_{request.param.upper()} names no server")
    for study in optuna.get_all_study_names(url):
        optuna.delete_study(study_name=study, storage=url)
    return url


def test_two_tuners_share_the_work(tmp_path: Path, server: str) -> None:
    tuners = [start(tmp_path, server), start(tmp_path, server)]
    assert all("recommended" in finish(tuner) for tuner in tuners)
    check_whole(tmp_path, [], server)


def test_machines_with_files_of_their_own_share_the_work(tmp_path: Path, server: str) -> None:
    """Two outputs, one study: each ends with the records of all."""
    outputs = [tmp_path / "here", tmp_path / "there"]
    for output in outputs:
        output.mkdir()
    tuners = [start(output, server) for output in outputs]
    for tuner in tuners:
        finish(tuner)
    for output in outputs:
        finish(start(output, server))  # which asks the study for what the other has found
        assert len(read_records(output / "probes.jsonl").records) == len(SPACE)
        check_whole(output, [], server)


def test_killed_at_random_instants(tmp_path: Path, server: str) -> None:
    survive(tmp_path, 5, server)


def test_a_record_of_very_many_steps_fits_a_text_column(tmp_path: Path, server: str) -> None:
    study = make_study(server, tmp_path, SPACE, None, name=uuid.uuid4().hex)
    lease = study.lease(SPACE.candidates[0], 60)
    assert lease is not None
    samples = tuple(0.001 + i * 1e-9 for i in range(200_000))
    record = make_record(lease.candidate.setting, probe_id=lease.probe_id)
    study.finish(lease, record.model_copy(update={"step_seconds": samples}))
    (kept,) = study.records()
    assert 900 <= len(kept.step_seconds) <= 1000
    assert len(read_records(tmp_path / "probes.jsonl").records[0].step_seconds) == 200_000
