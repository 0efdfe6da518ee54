"""A search is read from whatever it left, and what cannot be read is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from planner.core.errors import UsageError
from planner.core.schema import MeasurementRecord, TrainSetting
from search.loop.study.identity import Identity
from search.loop.study.records import format_record
from search.runs.reading import is_run, read_run
from search.tuning.tune import tune
from tests.search.study.test_study import open_study, probe_one
from tests.search.tables import GPU, MODEL, invented_table, make_record


@pytest.fixture(scope="module")
def first_replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    table = folder / "table.jsonl"
    table.write_bytes(b"".join(format_record(r) for r in invented_table()))
    tune(None, replay=table, output=folder / "run", estimator=None)
    return folder / "run"


@pytest.fixture
def replayed(tmp_path: Path, first_replay: Path) -> Path:
    shutil.copytree(first_replay, tmp_path / "run")
    return tmp_path / "run"


def measured(batch: int, **more: object):  # type: ignore[no-untyped-def]
    setting = TrainSetting(batch_size=batch)
    return make_record(setting, probe_id=f"probe-{batch}").model_copy(update=more)


def test_a_replay_replaces_those_of_an_earlier_one(replayed: Path, table: Path) -> None:
    before = read_run(replayed).records
    tune(None, replay=table, output=replayed, estimator=None, strategy="tpe", trials=3)
    after = read_run(replayed).records
    assert len(after) == 3 != len(before)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("gone", [None, "probes.jsonl", "recommendation.json"])
def test_a_replay_leaves_what_was_measured_alone(
    tmp_path: Path, table: Path, replayed: Path, gone: str | None
) -> None:
    """Either file by itself shows that a search on a device was here."""
    for path in replayed.iterdir():  # as that search would have left it
        path.write_bytes(path.read_bytes().replace(b'"replay-', b'"measured-'))
    if gone:
        (replayed / gone).unlink()
    before = contents(replayed)
    for source in (table, replayed / "probes.jsonl"):
        if source.exists():
            with pytest.raises(UsageError, match=r"probes made on a device, and a replay") as said:
                tune(None, replay=source, output=replayed, estimator=None)
            assert "another --output" in str(said.value)
            assert contents(replayed) == before


@pytest.mark.parametrize("name", ["probes.jsonl", "recommendation.json"])
def test_a_replay_writes_over_nothing_that_it_cannot_read(
    tmp_path: Path, table: Path, name: str
) -> None:
    (tmp_path / name).write_text('{"torn')
    with pytest.raises(UsageError, match=name):
        tune(None, replay=table, output=tmp_path, estimator=None)
    assert (tmp_path / name).read_text() == '{"torn'


def test_a_replay_of_a_replay_keeps_the_probes_of_both(replayed: Path) -> None:
    before = read_run(replayed).records
    tune(None, replay=replayed / "probes.jsonl", output=replayed, estimator=None, trials=1)
    assert read_run(replayed).records == before


def test_a_search_that_measures_does_not_go_on_from_a_replay(replayed: Path) -> None:
    before = sorted(path.name for path in replayed.iterdir())
    number = len(read_run(replayed).records)
    with pytest.raises(UsageError, match=f"holds {number} probes that a replay") as refused:
        tune(MODEL, device="cpu", output=replayed, accept_different=True, prober=never)
    assert "another --output" in str(refused.value)
    assert sorted(path.name for path in replayed.iterdir()) == before


def never(*asked: object) -> MeasurementRecord:
    raise AssertionError("probed")


@pytest.mark.parametrize("name", ["", "recommendation.json", "probes.jsonl"])
def test_a_folder_or_one_of_its_files_is_the_same_run(replayed: Path, name: str) -> None:
    assert is_run(str(replayed / name))
    named, folder = read_run(replayed / name), read_run(replayed)
    assert (named.found, named.records, named.place) == (folder.found, folder.records, folder.place)


def test_a_torn_line_and_a_faulty_recommendation_are_said(replayed: Path) -> None:
    whole = len(read_run(replayed).records)
    probes = replayed / "probes.jsonl"
    probes.write_bytes(probes.read_bytes()[:-40])
    (replayed / "recommendation.json").write_text('{"format": 99}')
    run = read_run(replayed)
    assert len(run.records) == whole - 1
    assert run.found is None
    assert "result format 99" in run.faults[0]
    assert "is torn" in run.faults[1]


def test_the_study_knows_who_made_a_probe_and_what_the_file_lost(tmp_path: Path) -> None:
    for position in (0, 1):
        study = open_study(tmp_path)
        study.adopt(Identity(MODEL, GPU, {"torch": "test"}))
        probe_one(study, position)
    run = read_run(tmp_path)
    assert len(run.records) == 2
    assert [run.tuners[r.probe_id][:7] for r in run.records] == ["tuner 1", "tuner 2"]
    (tmp_path / "probes.jsonl").unlink()
    assert read_run(tmp_path).records == run.records


@pytest.mark.parametrize("prefix", ["sqlite:///", ""])
def test_a_storage_is_a_run(tmp_path: Path, prefix: str) -> None:
    study = open_study(tmp_path / "deep")
    probe_one(study, 0)
    target = f"{prefix}{tmp_path / 'deep' / 'study.db'}"
    assert is_run(target)
    assert len(read_run(target).records) == 1
    with pytest.raises(UsageError, match="no study 'other'"):
        read_run(target, "other")


def test_a_damaged_study_does_not_hide_the_records(replayed: Path) -> None:
    (replayed / "study.db").write_bytes(b"garbage" * 1000)
    run = read_run(replayed)
    assert run.records
    assert "The study was not read" in run.faults[0]


@pytest.mark.parametrize("content", ["", "garbage\n", '{"a": 1}\n', "[" * 3000])
def test_what_holds_nothing_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"some\.jsonl"):
        read_run(path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match="holds no search"):
        read_run(empty)
