"""A search in TensorBoard, its event files read back with TensorBoard's own reader."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import search
from planner.errors import PlannerError
from planner.schema import MeasurementRecord, TrainSetting
from planner.units import GIB
from tests.search.tables import make_record

pytest.importorskip("tensorboard")


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def values(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def probed(number: int, rate: float | None, gib: float, batch_size: int = 8) -> MeasurementRecord:
    setting = TrainSetting(batch_size=batch_size, checkpointing="blocks" if number % 2 else "none")
    failed = {} if rate else {"status": "out_of_memory", "step_seconds": ()}
    used = int(gib * GIB)
    return make_record(setting, probe_id=f"p{number}").model_copy(
        update={
            "images_per_second": rate, "device_bytes": used, "peak_reserved_bytes": used,
            "peak_allocated_bytes": used, "allowed_bytes": 10 * GIB, **failed,
        }
    )  # fmt: skip


def test_scalars_by_probe_and_a_run_for_each(tmp_path: Path) -> None:
    records = [
        probed(1, 100.0, 4), probed(2, None, 12), probed(3, 300.0, 11), probed(4, 200.0, 8, 32),
    ]  # fmt: skip
    assert search.write_tensorboard(records, tmp_path) == tmp_path
    assert values(tmp_path, "search/images_per_second") == [(1, 100.0), (3, 300.0), (4, 200.0)]
    assert values(tmp_path, "search/memory_gib") == [(1, 4.0), (2, 12.0), (3, 11.0), (4, 8.0)]
    # The third is faster, and takes more than the search allowed.
    assert values(tmp_path, "search/best_images_per_second") == [(1, 100.0), (4, 200.0)]

    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    run = events(tmp_path / "probe_0004")
    assert [e.value for e in run.Scalars("probe/images_per_second")] == [200.0]
    content = run.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    said = HParamsPluginData.FromString(content).session_start_info.hparams
    assert said["batch_size"].number_value == 32
    assert said["checkpointing"].string_value == "none"
    assert said["status"].string_value == "measured"
    assert "ema" not in said  # in which no probes differ
    assert len(list(tmp_path.glob("probe_*"))) == 4


def test_nothing_is_an_empty_folder(tmp_path: Path) -> None:
    search.write_tensorboard([], tmp_path)
    assert events(tmp_path).Tags()["scalars"] == []


def test_without_tensorboard_the_way_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(PlannerError, match=r"pip install 'planner\[tensorboard\]'"):
        search.write_tensorboard([], tmp_path)
