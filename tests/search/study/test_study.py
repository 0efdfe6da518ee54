"""The study: leases, leases, what a killed tuner leaves, and files that are not ours."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path

import optuna
import pytest

from planner.errors import PlannerError, UsageError
from planner.schema import SwinConfig, TrainSetting
from search.replay import Replay
from search.space import Space, make_space
from search.study.identity import Identity
from search.study.optuna_study import IDENTITY as IDENTITY_ATTRIBUTE
from search.study.optuna_study import OptunaStudy, make_study
from search.study.records import append_records, read_records
from search.study.storage import StudyError, hidden_password
from tests.search.tables import GPU, MODEL, SMALL, make_record

SPACE: Space = make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(8, 16, 32, 512))
IDENTITY = Identity(MODEL, GPU, {"torch": "test"})
NOBODY = json.dumps(["elsewhere", "", 1, "1"])  # another machine: only its lease can end


def open_study(tmp_path: Path, storage: str | None = None) -> OptunaStudy:
    tmp_path.mkdir(exist_ok=True)
    return make_study(storage, tmp_path, SPACE, GPU.total_bytes)


def probe_one(study: OptunaStudy, position: int) -> str:
    lease = study.lease(SPACE.candidates[position], 60)
    assert lease is not None
    study.finish(lease, make_record(lease.candidate.setting, probe_id=lease.probe_id))
    return lease.probe_id


CARD = GPU.model_copy(update={"driver": "580.1", "uuid": "GPU-a"})


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
    open_study(tmp_path).adopt(Identity(MODEL, CARD, {"torch": "test"}))
    other = Identity(MODEL, CARD.model_copy(update=changed), {"torch": "test"})
    again = open_study(tmp_path)
    record = make_record(SPACE.candidates[0].setting, probe_id="p", device=other.device)
    append_records(tmp_path / "probes.jsonl", [record])
    if not differs:
        assert again.adopt(other) == ()
        again.identity = Identity(MODEL, CARD, {"torch": "test"})
        assert again.reconcile() == []
        assert [r.probe_id for r in again.records()] == ["p"]
        return
    with pytest.raises(StudyError, match=differs) as raised:
        again.adopt(other)
    assert "uuid" not in str(raised.value)
    again.identity = Identity(MODEL, CARD, {"torch": "test"})
    again.reconcile()
    assert again.records() == ()


def test_a_study_of_before_uuids_is_still_ours(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    old = Identity(MODEL, CARD, {"torch": "test"}).to_json()
    del old["device"]["uuid"]
    study.study.set_user_attr(IDENTITY_ATTRIBUTE, old)
    assert study.adopt(Identity(MODEL, CARD, {"torch": "test"})) == ()


def test_cards_that_are_alike_replay_as_one() -> None:
    setting = SPACE.candidates[0].setting
    near = CARD.model_copy(update={"uuid": "GPU-b", "total_bytes": CARD.total_bytes - 2**27})
    records = [make_record(setting, device=d) for d in (CARD, near)]
    assert Replay(records).device == CARD
    far = make_record(setting, device=CARD.model_copy(update={"name": "Another"}))
    with pytest.raises(UsageError, match="2 devices"):
        Replay([*records, far])


@pytest.mark.parametrize("storage", [None, "{}/study.journal"])
def test_records_come_back_in_order(tmp_path: Path, storage: str | None) -> None:
    url = storage and storage.format(tmp_path)
    study = open_study(tmp_path, url)
    ids = [probe_one(study, i) for i in (0, 3, 1)]
    again = open_study(tmp_path, url)
    assert again.reconcile() == []
    assert [r.probe_id for r in again.records()] == ids
    assert [r.probe_id for r in read_records(tmp_path / "probes.jsonl").records] == ids


def test_an_out_of_memory_probe_is_complete_with_a_violated_constraint(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    fits = probe_one(study, 0)
    probe_one(study, 3)  # batch 512 does not fit
    trials = study.study.get_trials()
    assert [t.state for t in trials] == [optuna.trial.TrialState.COMPLETE] * 2
    assert trials[0].constraints["memory"] <= 0 < trials[1].constraints["memory"]
    assert trials[1].value == pytest.approx(trials[0].value)  # imputed, never 0
    assert study.study.best_trial.user_attrs["probe_id"] == fits


def test_two_tuners_do_not_lease_one_setting(tmp_path: Path) -> None:
    first, second = open_study(tmp_path), open_study(tmp_path)
    second.holder = NOBODY
    lease = first.lease(SPACE.candidates[0], 60)
    assert lease is not None
    assert second.lease(SPACE.candidates[0], 60) is None
    assert SPACE.candidates[0].id in second.busy()
    assert second.lease(SPACE.candidates[1], 60) is not None
    first.release(lease, "test")
    assert second.lease(SPACE.candidates[0], 60) is not None


def test_a_finished_setting_is_not_leased_again_but_a_repeat_is(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    probe_one(study, 0)
    assert study.lease(SPACE.candidates[0], 60) is None
    assert study.lease(SPACE.candidates[0], 60, repeat=1) is not None


def test_a_lease_expires(tmp_path: Path) -> None:
    gone, here = open_study(tmp_path), open_study(tmp_path)
    gone.holder = NOBODY
    assert gone.lease(SPACE.candidates[0], 10) is not None
    assert here.lease(SPACE.candidates[0], 10) is None
    now = time.time()
    here.clock = lambda: now + 10 + 61
    here.reconcile()
    assert here.lease(SPACE.candidates[0], 10) is not None


def test_the_lease_of_a_dead_process_is_free_at_once(tmp_path: Path) -> None:
    dead, here = open_study(tmp_path), open_study(tmp_path)
    host, boot, pid, *_ = json.loads(dead.holder)
    dead.holder = json.dumps([host, boot, pid, "0"])  # the pid lives, but began at another time
    assert dead.lease(SPACE.candidates[0], 3600) is not None
    assert here.busy() == set()
    here.reconcile()
    assert here.lease(SPACE.candidates[0], 60) is not None


@pytest.mark.parametrize("what", ["rebooted, or another of that name", "another container"])
def test_a_pid_of_elsewhere_tells_nothing(tmp_path: Path, what: str) -> None:
    """Machines from one image have one name, and their pids are each other's."""
    there, here = open_study(tmp_path), open_study(tmp_path)
    host, where, pid, *_ = json.loads(there.holder)
    boot, namespace = where.split(" ")
    other = f"another-boot {namespace}" if what.startswith("rebooted") else f"{boot} pid:[1]"
    there.holder = json.dumps([host, other, pid, "0"])
    assert there.lease(SPACE.candidates[0], 60) is not None
    assert here.busy() == {SPACE.candidates[0].id}
    assert here.lease(SPACE.candidates[0], 60) is None


def test_what_a_lost_tuner_had_received_is_heard_of_while_others_run(tmp_path: Path) -> None:
    lost, here = open_study(tmp_path), open_study(tmp_path)
    lost.holder = json.dumps([*json.loads(lost.holder)[:3], "0"])
    lease = lost.lease(SPACE.candidates[0], 60)
    assert lease is not None
    lost.receive(make_record(lease.candidate.setting, probe_id=lease.probe_id))
    assert here.busy() == set()
    assert [r.probe_id for r in here.records()] == [lease.probe_id]
    assert here.lease(SPACE.candidates[0], 60) is None


def test_leases_count_against_the_most_probes_of_a_study(tmp_path: Path) -> None:
    one, two = open_study(tmp_path), open_study(tmp_path)
    two.holder = NOBODY
    probe_one(one, 0)
    lease = one.lease(SPACE.candidates[1], 60, most=2)
    assert lease is not None
    assert two.lease(SPACE.candidates[2], 60, most=2) is None
    one.release(lease, "test")
    assert two.lease(SPACE.candidates[2], 60, most=2) is not None


def test_a_trial_that_another_finished_first_is_no_fault(tmp_path: Path) -> None:
    """Two tuners settle what a third left, at the same instant."""
    study = open_study(tmp_path)
    lease = study.lease(SPACE.candidates[0], 60)
    assert lease is not None
    running = study._find(lease.trial_number)
    record = make_record(lease.candidate.setting, probe_id=lease.probe_id)
    study.finish(lease, record)
    study._tell(running, record)
    study._release(running, "its tuner stopped")
    assert study.records() == (record,)


def test_of_two_that_found_a_study_at_once_one_is_first(tmp_path: Path) -> None:
    """Both have seen that it is nobody's: the second learns whose it is, and is refused."""
    one, two = open_study(tmp_path), open_study(tmp_path)
    other = Identity(MODEL, GPU.model_copy(update={"name": "H200"}), IDENTITY.versions)
    assert one._found(IDENTITY) == IDENTITY.to_json()
    assert two._found(other) == IDENTITY.to_json()
    with pytest.raises(StudyError, match="H200"):
        two.adopt(other)
    assert one.adopt(IDENTITY) == ()
    assert one.records() == ()
    assert one.busy() == set()


def test_recorded_but_not_told_is_told_on_resume(tmp_path: Path) -> None:
    """Killed between the line in probes.jsonl and the study."""
    dead = open_study(tmp_path)
    dead.holder = json.dumps([*json.loads(dead.holder)[:3], "0"])
    lease = dead.lease(SPACE.candidates[0], 60)
    assert lease is not None
    record = make_record(lease.candidate.setting, probe_id=lease.probe_id)
    append_records(tmp_path / "probes.jsonl", [record])
    for _ in range(2):  # and again: nothing is counted twice
        here = open_study(tmp_path)
        here.reconcile()
        assert [r.probe_id for r in here.records()] == [lease.probe_id]
        assert len(here.study.get_trials()) == 1
    assert len(read_records(tmp_path / "probes.jsonl").records) == 1


def test_received_but_not_recorded_is_recorded_on_resume(tmp_path: Path) -> None:
    """Killed while the worker whose result was in was still ending."""
    dead = open_study(tmp_path)
    dead.holder = json.dumps([*json.loads(dead.holder)[:3], "0"])
    lease = dead.lease(SPACE.candidates[0], 60)
    assert lease is not None
    dead.receive(make_record(lease.candidate.setting, probe_id=lease.probe_id))
    assert read_records(tmp_path / "probes.jsonl").records == ()
    for _ in range(2):
        here = open_study(tmp_path)
        here.reconcile()
        assert [r.probe_id for r in here.records()] == [lease.probe_id]
        assert len(read_records(tmp_path / "probes.jsonl").records) == 1


def test_a_lease_that_was_received_is_finished_and_not_given_back(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    leases = [study.lease(SPACE.candidates[i], 60) for i in (0, 1)]
    assert leases[0] is not None
    assert leases[1] is not None
    study.receive(make_record(leases[0].candidate.setting, probe_id=leases[0].probe_id))
    for lease in leases:
        assert lease is not None
        study.release(lease, "interrupted")
    assert [r.probe_id for r in study.records()] == [leases[0].probe_id]
    assert [r.probe_id for r in read_records(tmp_path / "probes.jsonl").records] == [
        leases[0].probe_id
    ]
    assert study.lease(SPACE.candidates[0], 60) is None
    assert study.lease(SPACE.candidates[1], 60) is not None


def test_a_record_that_came_after_its_lease_is_kept(tmp_path: Path) -> None:
    """A suspended machine: another tuner has freed the setting before the probe ended."""
    slow, other = open_study(tmp_path), open_study(tmp_path)
    lease = slow.lease(SPACE.candidates[0], seconds=-1000)
    assert lease is not None
    other.reconcile()  # frees it
    slow.finish(lease, make_record(lease.candidate.setting, probe_id=lease.probe_id))
    assert [r.probe_id for r in other.records()] == [lease.probe_id], "others hear of it at once"
    for _ in range(2):
        here = open_study(tmp_path)
        here.reconcile()
        assert [r.probe_id for r in here.records()] == [lease.probe_id]
        assert len(read_records(tmp_path / "probes.jsonl").records) == 1


def test_two_tuners_in_one_process_leave_each_others_leases_alone(tmp_path: Path) -> None:
    one, two = open_study(tmp_path), open_study(tmp_path)
    lease = one.lease(SPACE.candidates[0], 60)
    assert lease is not None
    one.receive(make_record(lease.candidate.setting, probe_id=lease.probe_id))
    two.reconcile()
    assert two.records() == ()
    one.finish(lease, make_record(lease.candidate.setting, probe_id=lease.probe_id))
    assert len(two.records()) == 1


def test_records_of_anothers_search_are_left_alone(tmp_path: Path) -> None:
    theirs = make_record(SPACE.candidates[0].setting, probe_id="theirs")
    older = make_record(SPACE.candidates[1].setting, probe_id="older")
    ours = make_record(SPACE.candidates[2].setting, probe_id="ours")
    append_records(
        tmp_path / "probes.jsonl",
        [
            theirs.model_copy(update={"model": SwinConfig(embed_dim=48)}),
            older.model_copy(update={"versions": {"torch": "1.13"}}),
            ours.model_copy(update={"versions": dict(IDENTITY.versions)}),
        ],
    )
    study = open_study(tmp_path)
    study.adopt(IDENTITY)
    said = study.reconcile()
    assert [r.probe_id for r in study.records()] == ["ours"]
    assert "2 probes" in said[0]
    assert "another model" in said[0]
    told = open_study(tmp_path)
    told.adopt(IDENTITY, accept_different=True)
    assert told.reconcile() == []
    assert len(told.records()) == 3


def test_a_lost_database_is_made_again_from_the_records(tmp_path: Path) -> None:
    ids = {probe_one(open_study(tmp_path), i) for i in (0, 1)}
    (tmp_path / "study.db").unlink()
    again = open_study(tmp_path)
    again.reconcile()
    assert {r.probe_id for r in again.records()} == ids
    assert again.lease(SPACE.candidates[0], 60) is None


def test_a_lost_records_file_is_made_again_from_the_study(tmp_path: Path) -> None:
    ids = [probe_one(open_study(tmp_path), i) for i in (0, 1)]
    (tmp_path / "probes.jsonl").unlink()
    open_study(tmp_path).reconcile()
    assert [r.probe_id for r in read_records(tmp_path / "probes.jsonl").records] == ids


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Identity(SwinConfig(embed_dim=48), GPU, IDENTITY.versions), "embed_dim: 96 there, 48"),
        (Identity(MODEL, GPU.model_copy(update={"name": "H200"}), IDENTITY.versions), "H200"),
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


def test_a_truncated_study_is_said_and_left_alone(tmp_path: Path) -> None:
    probe_one(open_study(tmp_path), 0)
    path = tmp_path / "study.db"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = path.read_bytes()
    with pytest.raises(StudyError, match="damaged or truncated"):
        open_study(tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"{}"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "study.db").write_bytes(content)
    with pytest.raises(StudyError):
        open_study(tmp_path)
    assert (tmp_path / "study.db").read_bytes() == content


def test_a_foreign_database_gets_no_tables_of_ours(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute("create table recipes (name text)")
    with pytest.raises(StudyError, match="something else"):
        open_study(tmp_path)
    with sqlite3.connect(tmp_path / "study.db") as connection:
        tables = connection.execute("select name from sqlite_master").fetchall()
    assert tables == [("recipes",)]


def test_a_read_only_study_is_said(tmp_path: Path) -> None:
    """SQLite's own read-only mode: the tests may run as root, whom file modes do not stop."""
    open_study(tmp_path)
    url = f"sqlite:///file:{tmp_path / 'study.db'}?mode=ro&uri=true"
    with pytest.raises(StudyError, match="read-only"):
        probe_one(open_study(tmp_path, url), 0)


def test_a_disk_that_fills_up_keeps_the_record_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spill))
    study = open_study(tmp_path)
    study.records_path = Path("/dev/full")
    with pytest.raises(PlannerError, match="No space left") as caught:
        probe_one(study, 0)
    kept = next(spill.glob("*/full"))  # by the name that it has where it could not be written
    assert kept.parent.stat().st_mode & 0o777 == 0o700  # nobody else reads it or puts a link there
    assert str(kept) in str(caught.value)
    assert len(read_records(kept).records) == 1


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


def test_a_storage_that_is_neither_url_nor_journal(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="neither"):
        open_study(tmp_path, "study")


def test_settings_of_a_narrower_search_stay_in_the_study(tmp_path: Path) -> None:
    """A resumed search over fewer settings ignores the others and does not lose them."""
    probe_one(open_study(tmp_path), 0)
    narrow = make_space(MODEL, GPU, TrainSetting(), restrict={**SMALL, "precision": ("bf16",)},
                        batch_sizes=(64,))  # fmt: skip
    study = make_study(None, tmp_path, narrow, GPU.total_bytes)
    study.reconcile()
    lease = study.lease(narrow.candidates[0], 60)
    assert lease is not None
    study.finish(lease, make_record(lease.candidate.setting, probe_id=lease.probe_id))
    assert len(study.records()) == 2


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
    assert lease is not None
    study.finish(lease, make_record(lease.candidate.setting, probe_id=lease.probe_id))
    again = make_study(where, tmp_path, wider, GPU.total_bytes)
    assert again.records() == study.records()
    assert len(again.records()) == 2
    assert again.lease(wider.candidates[1], 60) is not None
