"""Records on disk: whole or not there, read up to a fault, safe from torn lines and full disks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.schema import TrainSetting
from planner.schema.observation import ObservationRecord
from search.kinds import Line
from search.study.records import (
    RecordsNotWrittenError,
    append_records,
    check_writable,
    format_record,
    parse_record,
    read_records,
)
from tests.benches.cases import record as bench_record
from tests.search.tables import GPU, make_record


def record(n: int):  # type: ignore[no-untyped-def]
    return make_record(TrainSetting(batch_size=n), probe_id=f"probe-{n}")


def test_a_record_reads_back_equal(tmp_path: Path) -> None:
    for n in (1, 512):  # one measured, one out of memory
        assert parse_record(format_record(record(n))) == record(n)


def test_a_probe_is_appended_once(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    assert append_records(path, [record(1), record(2)]) == 2
    assert append_records(path, [record(2), record(3)]) == 1
    assert [r.probe_id for r in read_records(path).records] == ["probe-1", "probe-2", "probe-3"]


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


SEEN = ObservationRecord(
    observation="first", see="near-limit", what="how it fails", device=GPU, versions={},
    date="2026-01-01T00:00:00+00:00", status="seen",
)  # fmt: skip


@pytest.mark.parametrize("line", [record(1), SEEN, bench_record(0.2, 0.1, 0.3)])
@pytest.mark.parametrize("length", [40, None])
def test_a_file_that_begins_with_a_record_is_gone_on_with(
    tmp_path: Path, line: Line, length: int | None
) -> None:
    """Of any kind, whole or torn."""
    path = tmp_path / "records.jsonl"
    path.write_bytes(format_record(line)[:length])
    check_writable(path)


def test_records_in_another_layout_are_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    path.write_text(json.dumps(json.loads(format_record(record(1)))) + "\n")
    check_writable(path)
    assert append_records(path, [record(1), record(2)]) == 1


def test_a_first_record_that_was_torn_is_nobody_else_s(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    path.write_bytes(format_record(record(1))[:40])
    check_writable(path)
    append_records(path, [record(2)])
    assert [r.probe_id for r in read_records(path).records] == ["probe-2"]


def test_a_bad_line_ends_the_reading_and_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    path.write_bytes(format_record(record(1)) + b'{"format": 1}\n' + format_record(record(2)))
    before = path.read_bytes()
    file = read_records(path)
    assert len(file.records) == 1
    assert "line 2" in file.fault
    append_records(path, [record(3)])
    assert path.read_bytes().startswith(before)  # nothing is overwritten


def test_a_newer_format_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    path.write_bytes(format_record(record(1).model_copy(update={"format": 99})))
    assert "newer" in read_records(path).fault


def test_a_full_device_is_said() -> None:
    with pytest.raises(RecordsNotWrittenError, match="No space left"):
        append_records("/dev/full", [record(1)])


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """RLIMIT_FSIZE in a process of its own: a write stops in the middle of a record."""
    path = tmp_path / "probes.jsonl"
    append_records(path, [record(1)])
    before = path.read_bytes()
    script = textwrap.dedent(f"""
        import resource
        from planner.schema import TrainSetting
        from search.study.records import RecordsNotWrittenError, append_records
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
