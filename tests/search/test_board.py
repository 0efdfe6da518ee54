"""`tune(tensorboard=)`: what TensorBoard reads during a search, after it, and when it goes on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.errors import PlannerError
from planner.schema import MeasurementRecord
from search.board import BEST, MEMORY, PROBE_RATE, RATE
from search.report.tensorboard import write_tensorboard
from search.study.records import format_record, read_records
from search.tuning import tune
from tests.search.report.test_tensorboard import events, values
from tests.search.tables import invented_table
from tests.search.test_tune import gpu, run  # noqa: F401  # a fixture

pytest.importorskip("tensorboard")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.jsonl"
    path.write_bytes(b"".join(format_record(r) for r in invented_table()))
    return path


def rates(records: tuple[MeasurementRecord, ...]) -> list[tuple[int, float]]:
    return [
        (number, pytest.approx(r.images_per_second, rel=1e-6))
        for number, r in enumerate(records, start=1)
        if r.images_per_second is not None
    ]


@pytest.mark.usefixtures("gpu")
def test_each_probe_is_there_when_it_has_ended(tmp_path: Path) -> None:
    board, read = tmp_path / "board", []

    def look(progress: Any) -> None:
        if progress.kind == "end":
            known = read_records(tmp_path / "probes.jsonl").records
            read.append(values(board, RATE) == rates(known))

    found = run(tmp_path, tensorboard=str(board), on_progress=look)
    assert len(read) == found.num_probes
    assert all(read)
    assert found.evidence is not None
    assert values(board, BEST)[-1][1] == pytest.approx(found.evidence.images_per_second)
    assert len(values(board, MEMORY)) >= len(values(board, RATE))


@pytest.mark.usefixtures("gpu")
def test_a_search_that_goes_on_has_each_probe_once(tmp_path: Path) -> None:
    board = tmp_path / "board"
    for trials in (2, 4):
        run(tmp_path, tensorboard=board, trials=trials, baseline=False)
    records = read_records(tmp_path / "probes.jsonl").records
    assert values(board, RATE) == rates(records)
    assert len(list(board.glob("probe_*"))) == 4
    assert [step for step, _ in values(board / "probe_0001", PROBE_RATE)] == [1]


@pytest.mark.parametrize("date", ["", "yesterday", "0001-01-01"])
def test_a_record_of_no_known_date_is_written_all_the_same(tmp_path: Path, date: str) -> None:
    measured = next(r for r in invented_table() if r.images_per_second)
    write_tensorboard([measured.model_copy(update={"date": date})], tmp_path)
    assert values(tmp_path, RATE) == rates((measured,))


def test_a_setting_shows_what_the_search_varies(tmp_path: Path, table: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    tune(None, replay=table, tensorboard=tmp_path / "board", trials=1, estimator=None)
    kept = events(tmp_path / "board" / "probe_0001").summary_metadata
    content = kept["_hparams_/session_start_info"].plugin_data.content
    said = HParamsPluginData.FromString(content).session_start_info.hparams
    differing = {
        name
        for name in type(invented_table()[0].setting).model_fields
        if len({getattr(r.setting, name) for r in invented_table()}) > 1
    }
    assert differing < set(said)
    assert "ema" not in said


@pytest.mark.parametrize("part", ["summary.writer.record_writer", "plugins.hparams.summary_v2"])
def test_nothing_is_probed_where_tensorboard_is_missing(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, part: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, f"tensorboard.{part}", None)
    board = tmp_path / "board"
    assert main(["tune", "--replay", str(table), "--tensorboard", str(board)]) == 1
    said = capsys.readouterr()
    assert "pip install 'planner[tensorboard]'" in said.err
    assert "probe 1" not in said.err
    assert not board.exists()


def test_nothing_is_probed_where_no_folder_can_be(tmp_path: Path, table: Path) -> None:
    told: list[Any] = []
    with pytest.raises(PlannerError, match=r"table.jsonl' cannot be written: File exists"):
        tune(None, replay=table, tensorboard=table, on_progress=told.append)
    assert all(progress.kind == "note" for progress in told)


def test_a_board_that_fails_later_ends_no_search(tmp_path: Path, table: Path) -> None:
    board, told = tmp_path / "board", []

    def spoil(progress: Any) -> None:
        if progress.kind == "note":
            told.append(progress.text)
        if progress.kind == "end" and board.is_dir():
            shutil.rmtree(board)
            board.write_text("no folder")

    found = tune(None, replay=table, tensorboard=board, on_progress=spoil, estimator=None)
    assert found.status == "recommended"
    assert found.num_probes > 1
    assert len([text for text in told if "gets no more of this search" in text]) == 1


def test_the_command_writes_one_without_torch(tmp_path: Path, table: Path) -> None:
    board = tmp_path / "board"
    asked = ["--trials", "3", "--no-baseline", "--tensorboard", str(board), "--quiet"]
    code = (
        "import sys; from planner.cli import main;"
        f"print(main({['tune', '--replay', str(table), *asked]!r}), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
    assert len(values(board, MEMORY)) == 3
