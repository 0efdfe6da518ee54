"""A search is read from whatever it left, and what cannot be read is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from planner.core.errors import UsageError
from planner.core.schema import TrainSetting
from search.runs.reading import describe_mixture, is_run, read_run
from tests.search.replays import leave_run
from tests.search.tables import invented_table, make_record
from tests.search.test_study import open_study, probe


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave_run(tmp_path_factory.mktemp("first") / "run", invented_table())


@pytest.fixture
def left(tmp_path: Path, first_run: Path) -> Path:
    shutil.copytree(first_run, tmp_path / "run")
    return tmp_path / "run"


def measured(batch: int, **more: object):  # type: ignore[no-untyped-def]
    setting = TrainSetting(batch_size=batch)
    return make_record(setting, probe_id=f"probe-{batch}").model_copy(update=more)


@pytest.mark.parametrize("name", ["", "recommendation.json", "probes.jsonl"])
def test_a_folder_or_one_of_its_files_is_the_same_run(left: Path, name: str) -> None:
    assert is_run(str(left / name))
    named, folder = read_run(left / name), read_run(left)
    assert (named.found, named.records, named.place) == (folder.found, folder.records, folder.place)


def test_a_torn_line_and_a_faulty_recommendation_are_said(left: Path) -> None:
    whole = len(read_run(left).records)
    probes = left / "probes.jsonl"
    probes.write_bytes(probes.read_bytes()[:-40])
    (left / "recommendation.json").write_text('{"format": 99}')
    run = read_run(left)
    assert len(run.records) == whole - 1
    assert run.found is None
    assert "result format 99" in run.faults[0]
    assert "is torn" in run.faults[1]


@pytest.mark.parametrize("prefix", ["sqlite:///", ""])
def test_a_storage_is_a_run_and_knows_who_made_a_probe(tmp_path: Path, prefix: str) -> None:
    for position in (0, 1):
        probe(open_study(tmp_path, f"sqlite:///{tmp_path}/study.db"), position)
    target = f"{prefix}{tmp_path / 'study.db'}"
    assert is_run(target)
    run = read_run(target)
    assert len(run.records) == 2
    assert [run.tuners[r.probe_id][:9] for r in run.records] == ["tuner 1 (", "tuner 1 ("]
    with pytest.raises(UsageError, match="no study 'other'"):
        read_run(target, "other")


def test_records_of_several_environments_are_said_to_be() -> None:
    setting = TrainSetting(batch_size=8)
    records = [
        make_record(setting).model_copy(update={"versions": {"torch": version}})
        for version in ("2.13", "2.14", "2.13")
    ]
    said = describe_mixture(records)
    assert said is not None
    assert said.endswith("several environments: versions.torch: 2.13 there, 2.14 here.")
    assert describe_mixture(records[:1]) is None


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
