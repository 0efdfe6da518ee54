"""The study: filled from records, shared by tuners, and files that are not ours."""

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy import text

from planner.core.errors import UsageError
from planner.core.schema import MeasurementRecord, SwinConfig
from search.loop.options import hidden_password
from search.loop.records import append_records, hold_folder, read_records
from search.loop.space import Space, make_space
from search.loop.study import ProbeStudy, StudyError, StudyIdentity
from tests.search.tables import GPU, MODEL, SMALL, make_record

SPACE: Space = make_space(MODEL, GPU, restrict=SMALL, batch_sizes=(8, 16, 32, 512))
VERSIONS = {"torch": "test"}
CARD = GPU.model_copy(update={"driver": "580.1", "uuid": "GPU-a"})
OURS = StudyIdentity(model=MODEL, device=GPU, versions=VERSIONS)


def open_study(tmp_path: Path, storage: str | None = None, **given: Any) -> ProbeStudy:
    study = ProbeStudy(SPACE, tmp_path / "probes.jsonl", GPU.total_bytes, storage)
    study.take_over(given.pop("identity", OURS), **given)
    return study


def begun(study: ProbeStudy, position: int, most: int | None = None) -> optuna.Trial | None:
    """The trial of a probe that was begun; None where it may not be."""
    study.optuna_study.enqueue_trial(study.params.of(study.params.space.candidates[position]))
    trial = study.optuna_study.ask()
    study.params.suggest(trial)
    if study.begin(trial, 60.0, most):
        return trial
    study.optuna_study.tell(trial, state=TrialState.FAIL)
    return None


def probe(study: ProbeStudy, position: int, **fields: Any) -> str | None:
    """A probe of a candidate from ask to tell, as a search makes it; None where another was
    first."""
    trial = begun(study, position)
    if trial is None:
        return None
    setting = SPACE.candidates[position].setting
    record = make_record(setting, probe_id=uuid.uuid4().hex).model_copy(update=fields)
    study.keep(record)
    try:
        study.optuna_study.tell(trial, study.tell(trial, record))
    except optuna.TrialPruned:
        study.optuna_study.tell(trial, state=TrialState.PRUNED)
    return record.probe_id


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
        ({"memory_cap_bytes": 8}, "memory_cap_bytes"),
    ],
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_card_is_itself_however_its_memory_was_read(
    tmp_path: Path, changed: dict[str, object], differs: str, is_shared: bool
) -> None:
    storage = str(tmp_path / "a.journal") if is_shared else None
    ours = StudyIdentity(model=MODEL, device=CARD, versions=VERSIONS)
    open_study(tmp_path, storage, identity=ours)
    record = make_record(SPACE.candidates[0].setting, probe_id="p", device=CARD)
    append_records(tmp_path / "probes.jsonl", [record])
    other = StudyIdentity(model=MODEL, device=CARD.model_copy(update=changed), versions=VERSIONS)
    if differs:
        with pytest.raises(StudyError, match=differs) as raised:
            open_study(tmp_path, storage, identity=other)
        assert "uuid" not in str(raised.value)
        assert "--accept-different" in str(raised.value)
    again = open_study(tmp_path, storage, identity=other, accept_different=bool(differs))
    assert ids(again.records()) == ["p"]


@pytest.mark.parametrize("storage", [None, "{}/study.journal", "sqlite:///{}/study.db"])
def test_records_come_back_in_order(tmp_path: Path, storage: str | None) -> None:
    url = storage and storage.format(tmp_path)
    study = open_study(tmp_path, url)
    found = [probe(study, i) for i in (0, 3, 1)]
    again = open_study(tmp_path, url)
    assert ids(again.records()) == written(tmp_path) == found
    if url:
        (tmp_path / "probes.jsonl").unlink()
        open_study(tmp_path, url).save()
        assert written(tmp_path) == found, "a lost file is made again from the study"
        for lost in tmp_path.glob("study.*"):
            lost.unlink()
        assert ids(open_study(tmp_path, url).records()) == found, "and a lost study from the file"


def test_a_probe_that_failed_or_took_too_much_is_pruned(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    probe(study, 0)
    probe(study, 3)  # batch 512 does not fit
    probe(study, 1, device_bytes=2 * GPU.total_bytes)
    for opened in (study, open_study(tmp_path)):  # and when filled
        trials = opened.optuna_study.trials
        assert [t.state for t in trials] == [TrialState.COMPLETE, *[TrialState.PRUNED] * 2]
        assert trials[1].value is trials[2].value is None


@pytest.mark.parametrize("storage", ["{}/study.journal", "sqlite:///{}/study.db"])
def test_two_tuners_do_not_probe_one_setting_at_once(tmp_path: Path, storage: str) -> None:
    url = storage.format(tmp_path)
    first, second = open_study(tmp_path, url), open_study(tmp_path, url)
    trial = begun(first, 0)
    assert second.busy() == {SPACE.candidates[0].id}
    assert probe(second, 0) is None
    assert probe(second, 1) is not None
    first.optuna_study.tell(trial, state=TrialState.FAIL)
    assert second.busy() == set()
    assert probe(second, 0) is not None


def test_no_more_probes_than_are_allowed_are_begun_by_all_together(tmp_path: Path) -> None:
    study = open_study(tmp_path, str(tmp_path / "a.journal"))
    probe(study, 0)
    assert begun(study, 1, most=1) is None


def test_what_a_dead_tuner_was_at_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a database by its heartbeat; in a journal, and where it was killed before its first, once
    its probe should have ended."""
    now = 0.0
    for url in (f"sqlite:///{tmp_path}/study.db", f"{tmp_path}/a.journal"):
        gone, here = open_study(tmp_path, url), open_study(tmp_path, url)
        trial = begun(gone, 0)
        assert here.busy()
        if url.startswith("sqlite"):
            storage: Any = here.optuna_study._storage._backend  # type: ignore[attr-defined]
            storage.record_heartbeat(trial._trial_id)
            with storage.engine.begin() as connection:
                connection.execute(
                    text("update trial_heartbeats set heartbeat = '2026-01-01 00:00:00'")
                )
        else:
            now = 10**10
            monkeypatch.setattr("search.loop.study.time.time", lambda now=now: now)
        assert here.busy() == set()
        monkeypatch.undo()
        here.optuna_study.ask()
        monkeypatch.setattr("search.loop.study.MARGIN_SECONDS", 0.0)
        assert probe(here, 1) is not None  # no one waits for what it would have chosen


def test_records_of_anothers_search_are_left_alone(tmp_path: Path) -> None:
    theirs, older, ours = (
        make_record(SPACE.candidates[i].setting, probe_id=name).model_copy(update=update)
        for i, (name, update) in enumerate(
            (("theirs", {"model": SwinConfig(embed_dim=48)}),
             ("older", {"versions": {"torch": "1.13"}}), ("ours", {"versions": VERSIONS}))
        )
    )  # fmt: skip
    append_records(tmp_path / "probes.jsonl", [theirs, older, ours])
    study = ProbeStudy(SPACE, tmp_path / "probes.jsonl", None)
    (said,) = study.take_over(OURS)
    assert ids(study.records()) == ["ours"]
    assert said.startswith("2 probes")
    assert len(open_study(tmp_path, accept_different=True).records()) == 3


def test_a_folder_is_one_tuners_at_a_time(tmp_path: Path) -> None:
    with (
        hold_folder(tmp_path),
        pytest.raises(UsageError, match="another tuner"),
        hold_folder(tmp_path),
    ):
        pass
    with hold_folder(tmp_path):
        pass


def test_a_file_that_is_no_study_is_said_and_left_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    probe(open_study(tmp_path, url), 0)
    path = tmp_path / "study.db"
    truncated = path.read_bytes()[: path.stat().st_size // 2]
    for content in (truncated, b"no database" * 200, b"{}"):
        path.write_bytes(content)
        with pytest.raises(StudyError, match=r"study\.db cannot be used: .*(malformed|not a data)"):
            open_study(tmp_path, url)
        assert path.read_bytes() == content


def test_passwords_are_not_shown(tmp_path: Path) -> None:
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
    with pytest.raises(StudyError) as caught:
        open_study(tmp_path, "postgresql://me:hunter2@localhost:1/none")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("storage", [None, "study.journal"])
def test_a_wider_search_goes_on_with_a_study(tmp_path: Path, storage: str | None) -> None:
    """Optuna holds a parameter to its first values: an axis with others gets a name of its own."""
    where = storage and str(tmp_path / storage)
    probe(open_study(tmp_path, where), 0)
    wider = make_space(MODEL, GPU, restrict={**SMALL, "precision": ("fp32", "tf32", "bf16"),
                       "frozen_stages": (0, 2)}, batch_sizes=(8, 16))  # fmt: skip
    study = ProbeStudy(wider, tmp_path / "probes.jsonl", GPU.total_bytes, where)
    study.take_over(OURS)
    assert len(study.records()) == 1
    study.fill([make_record(wider.candidates[-1].setting, probe_id="new")])
    assert len(study.records()) == 2


PROGRAMS = ("initdb", "pg_ctl", *(("runuser",) if os.geteuid() == 0 else ()))


@pytest.fixture
def server() -> Iterator[str]:
    """A PostgreSQL server where its programs are installed."""
    pytest.importorskip("psycopg")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"there is no {missing[0]}")
    with postgresql() as url:
        yield url


@contextmanager
def postgresql() -> Iterator[str]:
    """The URL of an empty database, on a server that ends with the context."""
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # a socket's path must be short
    # The server refuses to run as root: then it runs as the user that its package has made.
    user = "postgres" if os.geteuid() == 0 else None
    before = ["runuser", "-u", user, "--"] if user else []
    if user:
        shutil.chown(folder, user)

    def run(*command: str) -> None:
        subprocess.run([*before, *command], check=True, stdout=subprocess.DEVNULL, cwd=folder)

    data = str(folder / "data")
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    try:
        run("initdb", "-D", data, "-U", "tuner", "-A", "trust", "-N")
        run("pg_ctl", "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            yield f"postgresql+psycopg://tuner@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder)


@pytest.mark.servers
def test_a_server_keeps_what_a_file_does(tmp_path: Path, server: str) -> None:
    """Also over a connection that it closed, as a firewall does to one that a long probe leaves
    idle; and of very many steps what a text column holds."""
    study = open_study(tmp_path, server)
    with study.optuna_study._storage._backend.engine.connect() as other:  # type: ignore[attr-defined]
        ask = (
            "select pg_terminate_backend(pid) from pg_stat_activity where "
            "pid != pg_backend_pid() and backend_type = 'client backend'"
        )
        other.execute(text(ask))
    probe(study, 0, step_seconds=tuple(0.001 + i * 1e-9 for i in range(200_000)))
    (kept,) = open_study(tmp_path / "..", server).records()
    assert 900 <= len(kept.step_seconds) <= 1000
    assert len(read_records(tmp_path / "probes.jsonl").records[0].step_seconds) == 200_000
