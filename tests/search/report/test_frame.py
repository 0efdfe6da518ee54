"""Records as a pandas frame: a row for each probe, in order, with columns that say their units."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import pytest

import search
from planner.core.errors import PlannerError, UsageError
from planner.core.schema import TrainSetting
from planner.core.schema.expected import Expected
from search.loop.study.records import append_records, read_records
from tests.search.tables import make_record

pandas = pytest.importorskip("pandas")
GRID = Path(__file__).parents[2] / "truth" / "cpu_grid_2026-11-20.jsonl"


def test_a_row_for_each_probe_in_order() -> None:
    records = read_records(GRID).records
    frame = search.records_frame(GRID)
    assert list(frame.probe_id) == [record.probe_id for record in records]
    assert list(frame.status) == [record.status for record in records]
    assert list(frame.batch_size) == [record.setting.batch_size for record in records]
    measured = frame[frame.status == "measured"]
    first = next(record for record in records if record.status == "measured")
    assert measured.iloc[0].images_per_second == first.images_per_second
    assert measured.iloc[0].step_seconds == median(first.step_seconds)
    assert measured.iloc[0].used_bytes == first.used_bytes
    assert frame.iloc[0]["version_torch"] == records[0].versions["torch"]
    assert frame.iloc[0].device_name == records[0].device.name
    kinds = frame.dtypes.astype(str)
    assert (kinds.date, kinds.used_bytes) == ("datetime64[us, UTC]", "Int64")
    assert (kinds.ema, kinds.precision) == ("boolean", "category")
    best = frame.groupby("checkpointing", observed=True).images_per_second.max()
    assert set(best.index) == {record.setting.checkpointing for record in records}


def test_files_records_and_folders_go_together(tmp_path: Path) -> None:
    expected = Expected(
        phase="calibrate", basis="prior", images_per_second=(1.0, 2.0, 3.0),
        used_bytes=(4.0, 5.0, 6.0), fits=0.5,
    )  # fmt: skip
    one = make_record(TrainSetting(batch_size=8), probe_id="one").model_copy(
        update={"expected": expected, "flags": ("a", "b")}
    )
    two = make_record(TrainSetting(batch_size=16), probe_id="two")
    append_records(tmp_path / "probes.jsonl", [two])
    frame = search.records_frame([one, tmp_path, [str(tmp_path / "probes.jsonl")]])
    assert list(frame.probe_id) == ["one", "two", "two"]
    assert (frame.expected_images_per_second[0], frame.expected_used_bytes[0]) == (2.0, 5.0)
    assert frame.expected_fits.isna().tolist() == [False, True, True]
    assert frame["flags"][0] == "a; b"
    assert len(search.records_frame(one)) == 1


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        search.records_frame(tmp_path / "nowhere.jsonl")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(PlannerError, match="pip install pandas"):
        search.records_frame([])
