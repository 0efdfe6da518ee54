"""The study: leases, what a killed tuner leaves, and files that are not ours."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import optuna
import pytest

from planner.core.schema import MeasurementRecord, SwinConfig
from search.loop.space import Space, make_space
from search.loop.study.identity import Identity
from search.loop.study.optuna_study import OptunaStudy, make_study
from search.loop.study.records import append_records, read_records
from search.loop.study.storage import StudyError, hidden_password
from tests.search.tables import GPU, MODEL, SMALL, make_record

SPACE: Space = make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(8, 16, 32, 512))
IDENTITY = Identity(MODEL, GPU, {"torch": "test"})
NOBODY = json.dumps(["elsewhere", "", 1, "1"])  # another machine: only its lease can end
CARD = GPU.model_copy(update={"driver": "580.1", "uuid": "GPU-a"})
OURS = Identity(MODEL, CARD, {"torch": "test"})


def open_study(tmp_path: Path, storage: str | None = None) -> OptunaStudy:
    tmp_path.mkdir(exist_ok=True)
    return make_study(storage, tmp_path, SPACE, GPU.total_bytes)


def reopened(tmp_path: Path) -> OptunaStudy:
    """By a tuner that comes later, and sees to what others have left."""
    study = open_study(tmp_path)
    study.reconcile()
    return study


def dead_study(tmp_path: Path) -> OptunaStudy:
    """That of a process that has ended: its pid lives, but began at another time."""
    study = open_study(tmp_path)
    study.holder = json.dumps([*json.loads(study.holder)[:3], "0"])
    return study


def leased(study: OptunaStudy, position: int = 0, seconds: float = 60, **how: Any) -> Any:
    return study.lease(SPACE.candidates[position], seconds, **how)


def record_of(lease: Any) -> MeasurementRecord:
    return make_record(lease.candidate.setting, probe_id=lease.probe_id)


def probe_one(study: OptunaStudy, position: int, **fields: Any) -> str:
    lease = leased(study, position)
    study.finish(lease, record_of(lease).model_copy(update=fields))
    return lease.probe_id


def ids(records: Iterable[MeasurementRecord]) -> list[str]:
    return [record.probe_id for record in records]


def written(tmp_path: Path) -> list[str]:
    return ids(read_records(tmp_path / "probes.jsonl").records)


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({"total_bytes": int(GPU.total_bytes * 0.985)}, ""),  # NVML's total, or ECC switched
        ({"total_bytes": int(GPU.total_bytes * 0.97)}, "total_bytes"),
        ({"uuid": "GPU-b"}, ""),  # the next of eight alike
        ({"uuid": None, "driver": None}, ""),  # the driver's library did not answer
        ({"driver": "590.1"}, "driver"),
        ({"name": "Another"}, "name"),
        ({"memory_cap_bytes": 8}, "memory_cap_bytes"),
    ],
)
def test_a_card_is_itself_however_its_memory_was_read(
    tmp_path: Path, changed: dict[str, object], differs: str
) -> None:
    open_study(tmp_path).adopt(OURS)
    other = Identity(MODEL, CARD.model_copy(update=changed), {"torch": "test"})
    again = open_study(tmp_path)
    record = make_record(SPACE.candidates[0].setting, probe_id="p", device=other.device)
    append_records(tmp_path / "probes.jsonl", [record])
    if differs:
        with pytest.raises(StudyError, match=differs) as raised:
            again.adopt(other)
        assert "uuid" not in str(raised.value)
    else:
        assert again.adopt(other) == ()
    again.identity = OURS
    assert (again.reconcile() == []) == (not differs)
    assert ids(again.records()) == ([] if differs else ["p"])


@pytest.mark.parametrize("storage", [None, "{}/study.journal"])
def test_records_come_back_in_order(tmp_path: Path, storage: str | None) -> None:
    url = storage and storage.format(tmp_path)
    study = open_study(tmp_path, url)
    found = [probe_one(study, i) for i in (0, 3, 1)]
    again = open_study(tmp_path, url)
    assert again.reconcile() == []
    assert ids(again.records()) == written(tmp_path) == found
    (tmp_path / "probes.jsonl").unlink()
    open_study(tmp_path, url).reconcile()
    assert written(tmp_path) == found, "a lost file is made again from the study"


def test_a_lost_database_is_made_again_from_the_records(tmp_path: Path) -> None:
    found = {probe_one(open_study(tmp_path), i) for i in (0, 1)}
    (tmp_path / "study.db").unlink()
    again = reopened(tmp_path)
    assert {*ids(again.records())} == found
    assert leased(again) is None


def test_an_out_of_memory_probe_is_complete_with_a_violated_constraint(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    fits = probe_one(study, 0)
    probe_one(study, 3)  # batch 512 does not fit
    trials = study.study.get_trials()
    assert [t.state for t in trials] == [optuna.trial.TrialState.COMPLETE] * 2
    assert trials[0].constraints["memory"] <= 0 < trials[1].constraints["memory"]
    assert trials[1].value == pytest.approx(trials[0].value)  # imputed, never 0
    assert study.study.best_trial.user_attrs["probe_id"] == fits


def test_two_tuners_do_not_lease_one_setting_unless_it_is_a_repeat(tmp_path: Path) -> None:
    first, second = open_study(tmp_path), open_study(tmp_path)
    second.holder = NOBODY
    lease = leased(first)
    assert leased(second) is None
    assert SPACE.candidates[0].id in second.busy()
    assert leased(second, 1)
    first.release(lease, "test")
    again = leased(second)
    second.finish(again, record_of(again))
    assert leased(second) is None
    assert leased(second, repeat=1)


def test_a_lease_expires(tmp_path: Path) -> None:
    gone, here = open_study(tmp_path), open_study(tmp_path)
    gone.holder = NOBODY
    assert leased(gone, seconds=10)
    assert leased(here, seconds=10) is None
    now = time.time()
    here.clock = lambda: now + 10 + 61
    here.reconcile()
    assert leased(here, seconds=10)


def test_the_lease_of_a_dead_process_is_free_at_once(tmp_path: Path) -> None:
    assert leased(dead_study(tmp_path), seconds=3600)
    here = open_study(tmp_path)
    assert here.busy() == set()
    here.reconcile()
    assert leased(here)


@pytest.mark.parametrize("killed", ["recorded, not told", "received, not recorded"])
def test_what_a_killed_tuner_had_found_is_kept_once(tmp_path: Path, killed: str) -> None:
    """Killed between the line in probes.jsonl and the study, or while the worker whose result was
    in was still ending."""
    dead = dead_study(tmp_path)
    lease = leased(dead)
    if killed == "recorded, not told":
        append_records(tmp_path / "probes.jsonl", [record_of(lease)])
    else:
        dead.receive(record_of(lease))
        assert written(tmp_path) == []
    for _ in range(2):  # and again: nothing is counted twice
        here = reopened(tmp_path)
        assert ids(here.records()) == written(tmp_path) == [lease.probe_id]
        assert len(here.study.get_trials()) == 1


def test_records_of_anothers_search_are_left_alone(tmp_path: Path) -> None:
    theirs, older, ours = (
        make_record(SPACE.candidates[i].setting, probe_id=name).model_copy(update=update)
        for i, (name, update) in enumerate(
            (("theirs", {"model": SwinConfig(embed_dim=48)}),
             ("older", {"versions": {"torch": "1.13"}}),
             ("ours", {"versions": dict(IDENTITY.versions)}))
        )
    )  # fmt: skip
    append_records(tmp_path / "probes.jsonl", [theirs, older, ours])
    study = open_study(tmp_path)
    study.adopt(IDENTITY)
    said = study.reconcile()
    assert ids(study.records()) == ["ours"]
    assert "2 probes" in said[0]
    assert "another model" in said[0]
    told = open_study(tmp_path)
    told.adopt(IDENTITY, accept_different=True)
    assert told.reconcile() == []
    assert len(told.records()) == 3


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Identity(SwinConfig(embed_dim=48), GPU, IDENTITY.versions), "embed_dim: 96 there, 48"),
        (Identity(MODEL, GPU, {"torch": "2.99"}), "versions.torch: test there, 2.99 here"),
    ],
)
def test_anothers_study_is_refused_unless_told(tmp_path: Path, other: Identity, said: str) -> None:
    open_study(tmp_path).adopt(IDENTITY)
    with pytest.raises(StudyError) as caught:
        open_study(tmp_path).adopt(other)
    assert said in str(caught.value)
    assert "--accept-different" in str(caught.value)
    assert said in "\n".join(open_study(tmp_path).adopt(other, accept_different=True))


def test_a_file_that_is_no_study_is_said_and_left_alone(tmp_path: Path) -> None:
    probe_one(open_study(tmp_path), 0)
    path = tmp_path / "study.db"
    truncated = path.read_bytes()[: path.stat().st_size // 2]
    for content, said in (
        (truncated, "damaged or truncated"),
        (b"no database" * 200, None),
        (b"{}", None),
    ):
        path.write_bytes(content)
        with pytest.raises(StudyError, match=said):
            open_study(tmp_path)
        assert path.read_bytes() == content


def test_a_foreign_database_gets_no_tables_of_ours(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute("create table recipes (name text)")
    with pytest.raises(StudyError, match="something else"):
        open_study(tmp_path)
    with sqlite3.connect(tmp_path / "study.db") as connection:
        tables = connection.execute("select name from sqlite_master").fetchall()
    assert tables == [("recipes",)]


def test_passwords_are_not_shown() -> None:
    for url in (
        "postgresql://me:hunter2@db:5432/tuning",
        "mysql+pymysql://me:hun@ter2@db/x?password=hunter2",
        "postgresql://:hunter2@db/x",
        "postgresql://db/x?user=me&password=hunter2",
    ):
        assert "hunter2" not in hidden_password(url), url
        assert "ter2" not in hidden_password(url), url
    for url in ("sqlite:///study.db", "sqlite:///study.db?timeout=60"):
        assert hidden_password(url) == url


def test_an_unreachable_storage_shows_no_password(tmp_path: Path) -> None:
    url = "postgresql://me:hunter2@localhost:1/none"
    with pytest.raises(StudyError) as caught:
        open_study(tmp_path, url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("storage", [None, "study.journal"])
def test_a_wider_search_goes_on_with_a_study(tmp_path: Path, storage: str | None) -> None:
    """Optuna holds a parameter to its first values: an axis with others gets a name of its own."""
    where = storage and str(tmp_path / storage)
    probe_one(open_study(tmp_path, where), 0)
    wider = make_space(MODEL, GPU, restrict={**SMALL, "precision": ("fp32", "tf32", "bf16"),
                       "frozen_stages": (0, 2)}, batch_sizes=(8, 16))  # fmt: skip
    study = make_study(where, tmp_path, wider, GPU.total_bytes)
    study.reconcile()
    lease = study.lease(wider.candidates[-1], 60)
    study.finish(lease, record_of(lease))
    again = make_study(where, tmp_path, wider, GPU.total_bytes)
    assert again.records() == study.records()
    assert len(again.records()) == 2
    assert again.lease(wider.candidates[1], 60) is not None
