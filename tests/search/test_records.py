"""Records on disk: whole or not there, read up to a fault, safe from torn lines and full disks. A
search that is read from whatever it left, and the live panel of one that goes on."""

import json
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.errors import UsageError
from planner.core.schema import TrainSetting
from search.loop.records import (
    append_records,
    format_record,
    read_records,
)
from search.runs import describe_mixture, is_run, read_run
from tests.search.replays import leave_run
from tests.search.tables import invented_table, make_record


def record(n: int):  # type: ignore[no-untyped-def]
    return make_record(TrainSetting(batch_size=n), probe_id=f"probe-{n}")


def test_a_probe_is_appended_once(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    assert append_records(path, [record(1), record(2)]) == 2
    assert append_records(path, [record(2), record(3)]) == 1
    assert [r.probe_id for r in read_records(path).records] == ["probe-1", "probe-2", "probe-3"]
    path.write_text(json.dumps(json.loads(format_record(record(1)))) + "\n")  # another layout
    assert append_records(path, [record(1), record(2)]) == 1


@given(cut=st.integers(1, 2000))
def test_a_file_cut_anywhere_keeps_every_whole_record(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "probes.jsonl"
    lines = [format_record(record(n)) for n in (1, 2, 3)]
    data = b"".join(lines)[: -min(cut, len(lines[2]))]
    path.write_bytes(data)
    whole = 3 if data.endswith(lines[2].rstrip()) else 2
    file = read_records(path)
    assert len(file.records) == whole
    assert bool(file.fault) == (whole == 2 and not data.endswith(b"\n"))
    append_records(path, [record(4)])
    after = read_records(path)
    assert not after.fault
    assert [r.probe_id for r in after.records] == [f"probe-{n}" for n in (*range(1, whole + 1), 4)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("images_per_second", "NaN"), ("images_per_second", "1e400"), ("device_bytes", "9" * 30),
     ("probe_seconds", "-Infinity")],
)  # fmt: skip
def test_a_figure_that_nobody_can_have_measured_is_no_record(
    tmp_path: Path, field: str, value: str
) -> None:
    path = tmp_path / "probes.jsonl"
    data = json.loads(format_record(record(1))) | {field: "HERE"}
    path.write_text(json.dumps(data).replace('"HERE"', value))
    file = read_records(path)
    assert not file.records
    assert file.fault


def test_a_bad_line_ends_the_reading_and_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    path.write_bytes(format_record(record(1)) + b'{"format": 1}\n' + format_record(record(2)))
    before = path.read_bytes()
    file = read_records(path)
    assert len(file.records) == 1
    assert "line 2" in file.fault
    append_records(path, [record(3)])
    assert path.read_bytes().startswith(before)  # nothing is overwritten
    path.write_bytes(format_record(record(1).model_copy(update={"format": 99})))
    assert "newer" in read_records(path).fault


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """RLIMIT_FSIZE in a process of its own: a write stops in the middle of a record."""
    path = tmp_path / "probes.jsonl"
    append_records(path, [record(1)])
    before = path.read_bytes()
    script = textwrap.dedent(f"""
        import resource
        from planner.core.schema import TrainSetting
        from search.loop.records import RecordsNotWrittenError, append_records
        from tests.search.tables import make_record
        resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 200},) * 2)
        try:
            append_records({str(path)!r}, [make_record(TrainSetting(batch_size=2))])
        except RecordsNotWrittenError as error:
            print("said:", error)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "said:" in done.stdout
    assert path.read_bytes() == before
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.fixture
def left(tmp_path: Path) -> Path:
    return leave_run(tmp_path / "run", invented_table()[:40])


@pytest.mark.parametrize("name", ["", "recommendation.json", "probes.jsonl"])
def test_a_folder_or_one_of_its_files_is_the_same_run(left: Path, name: str) -> None:
    assert is_run(str(left / name))
    named, folder = read_run(left / name), read_run(left)
    assert (named.result, named.place) == (folder.result, folder.place)
    assert named.records == folder.records


def test_a_torn_line_and_a_faulty_recommendation_are_said(left: Path) -> None:
    whole = len(read_run(left).records)
    probes = left / "probes.jsonl"
    probes.write_bytes(probes.read_bytes()[:-40])
    (left / "recommendation.json").write_text('{"format": 99}')
    run = read_run(left)
    assert len(run.records) == whole - 1
    assert run.result is None
    assert "result format 99" in run.faults[0]
    assert "is torn" in run.faults[1]


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
