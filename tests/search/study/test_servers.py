"""A study in a database server, shared by tuners: the same laws as in a file.

PLANNER_TEST_POSTGRESQL and PLANNER_TEST_MYSQL name an empty database each, by URL. Without the
first a PostgreSQL is started where it is installed. Last run: PostgreSQL 15 (psycopg 3.3),
2026-11-22, and MariaDB 10.11 (PyMySQL 1.2), 2026-11-20.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from sqlalchemy import text

from search.loop.study.optuna_study import make_study
from search.loop.study.records import read_records
from tests.search.machines.park import Park, finish
from tests.search.study import postgres
from tests.search.study.test_study import SPACE
from tests.search.tables import make_record

SERVERS = {
    "postgresql": os.environ.get("PLANNER_TEST_POSTGRESQL"),
    "mysql": os.environ.get("PLANNER_TEST_MYSQL"),
}
pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def own_postgresql() -> Iterator[str | None]:
    if SERVERS["postgresql"] or postgres.why_no_server():
        yield None
        return
    with postgres.server() as url:
        yield url


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, own_postgresql: str | None) -> str:
    url = SERVERS[request.param]
    if url is None and request.param == "postgresql":
        url = own_postgresql
    if url is None:
        pytest.skip(f"PLANNER_TEST_{request.param.upper()} names no server")
    for study in optuna.get_all_study_names(url):
        optuna.delete_study(study_name=study, storage=url)
    return url


def test_machines_with_files_of_their_own_share_the_work(tmp_path: Path, server: str) -> None:
    park = Park(tmp_path)
    try:
        for tuner in [park.tune(host, server) for host in ("here", "there")]:
            finish(tuner)
    finally:
        park.close()
    park.check_agreement("here", "there")


def test_what_a_killed_tuner_left_is_probed_by_another(tmp_path: Path, server: str) -> None:
    dead, here = (make_study(server, tmp_path, SPACE, None, name="one") for _ in range(2))
    dead.holder = json.dumps([*json.loads(dead.holder)[:3], "0"])  # its pid began at another time
    told, lost = (dead.lease(SPACE.candidates[n], 3600) for n in (0, 1))
    dead.receive(make_record(told.candidate.setting, probe_id=told.probe_id))
    here.reconcile()
    assert [record.probe_id for record in here.records()] == [told.probe_id]
    assert here.lease(SPACE.candidates[0], 60) is None
    assert here.lease(lost.candidate, 60) is not None


def test_a_connection_that_the_server_closed_is_made_again(tmp_path: Path, server: str) -> None:
    """As a firewall does to one that a long probe leaves idle."""
    study = make_study(server, tmp_path, SPACE, None, name=uuid.uuid4().hex)
    lease = study.lease(SPACE.candidates[0], 60)
    with study.storage.engine.connect() as other:
        if not server.startswith("postgresql"):
            pytest.skip("how MySQL closes connections is not written here")
        ask = "select pg_terminate_backend(pid) from pg_stat_activity where pid != pg_backend_pid()"
        other.execute(text(f"{ask} and backend_type = 'client backend'"))
    study.finish(lease, make_record(lease.candidate.setting, probe_id=lease.probe_id))
    assert len(study.records()) == 1


def test_a_record_of_very_many_steps_fits_a_text_column(tmp_path: Path, server: str) -> None:
    study = make_study(server, tmp_path, SPACE, None, name=uuid.uuid4().hex)
    lease = study.lease(SPACE.candidates[0], 60)
    samples = tuple(0.001 + i * 1e-9 for i in range(200_000))
    record = make_record(lease.candidate.setting, probe_id=lease.probe_id)
    study.finish(lease, record.model_copy(update={"step_seconds": samples}))
    (kept,) = study.records()
    assert 900 <= len(kept.step_seconds) <= 1000
    assert len(read_records(tmp_path / "probes.jsonl").records[0].step_seconds) == 200_000
