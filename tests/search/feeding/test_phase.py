"""`tune(with_data=…)`: what is refused before a probe, and what is said where nothing is run."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from planner.core.errors import UnsupportedError, UsageError
from planner.core.schema import FactoryModel, NamedModel, SwinConfig
from planner.core.schema.loading import (
    DataRecommendation,
    DataSource,
    LoaderRecord,
    LoaderSetting,
)
from planner.training.loading.sources import find_source
from search.tuning.feeding.matching import check_batches, check_match, check_size
from search.tuning.own_model import Made
from search.tuning.tune import tune
from tests.search.feeding.pictures import make_folder
from tests.search.tables import MODEL

FOLDER = DataSource(kind="folder", location="/pictures", num_items=100, num_classes=20)
HERE = "tests.search.feeding.pictures"


def data_of(source: DataSource, rate: float = 500.0, size: int = 224) -> DataRecommendation:
    setting = LoaderSetting(workers=4, batch_size=64, image_size=(size, size))
    record = LoaderRecord(
        data=source, setting=setting, status="measured", images_per_second=rate,
        cpu_seconds_per_image=0.008, bound="decode",
    )  # fmt: skip
    return DataRecommendation(
        data=source, date=datetime.now(UTC).isoformat(), setting=setting, evidence=record,
        host={"usable_cpus": 4, "quota_cpus": None},
    )  # fmt: skip


def written(tmp_path: Path, found: DataRecommendation) -> Path:
    folder = tmp_path / "data-run"
    folder.mkdir()
    (folder / "data.json").write_text(found.model_dump_json())
    return folder


def test_a_replay_says_what_the_law_says_and_runs_nothing(tmp_path: Path, table: Path) -> None:
    folder = written(tmp_path, data_of(find_source(str(make_folder(tmp_path / "pictures")))))
    found = tune(None, replay=table, estimator=None, with_data=folder, output=tmp_path / "out")
    assert found.feeding.together is None
    assert found.feeding.bound == "loader"
    rate = found.evidence.images_per_second or 0.0
    assert found.feeding.waiting_share == pytest.approx(1 - 500 / rate, abs=1e-3)
    assert found.feeding.loader.batch_size == found.evidence.setting.batch_size
    assert any("a replay runs nothing" in note for note in found.feeding.notes)
    assert "feeding" in (tmp_path / "out" / "recommendation.json").read_text()


def test_data_that_the_model_does_not_take_are_refused() -> None:
    for model, said in (
        (SwinConfig(num_classes=10), "has 20 classes, and .* only 10.*\n.*--num-classes 20"),
        (SwinConfig(in_channels=4), "takes images of 4 channels"),
        (NamedModel(library="torchvision", name="swin3d_t", task="video"), "is video"),
    ):
        with pytest.raises((UsageError, UnsupportedError)) as caught:
            check_match(model, FOLDER)
        assert re.search(said, str(caught.value)), str(caught.value)


def test_data_beside_a_task_that_makes_batches_are_refused() -> None:
    model = FactoryModel(factory=f"{HERE}:task")
    with pytest.raises(UnsupportedError, match="makes batches of its own"):
        check_batches(model, Made(is_task=True), FOLDER)
    check_batches(model, Made(), FOLDER)
    check_batches(model, None, FOLDER)
    check_match(SwinConfig(num_classes=10), DataSource(kind="factory", location="a:b"))
    check_match(SwinConfig(num_classes=20), FOLDER)


def test_a_loader_of_other_pictures_is_refused() -> None:
    with pytest.raises(UsageError, match=r"at 384 × 384 px, and .* takes 224 × 224 px"):
        check_size(SwinConfig(), LoaderSetting(image_size=(384, 384)))
    check_size(SwinConfig(), LoaderSetting())


def test_refusals_come_before_any_probe(tmp_path: Path) -> None:
    folder = written(tmp_path, data_of(FOLDER, size=96))
    with pytest.raises(UsageError, match="96 × 96 px"):
        tune(MODEL, device="cpu", with_data=folder, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


NOTHING = data_of(FOLDER).model_copy(
    update={"setting": None, "evidence": None, "advice": "every picture is broken"}
)


def test_a_data_json_that_is_none_is_one_error(tmp_path: Path) -> None:
    for text, said in (
        ("{", "is not whole JSON"),
        ("{}", "faults"),
        ('{"loader_format": 99}', "format 99, newer than"),
        (NOTHING.model_dump_json(), "recommends no loader: every picture is broken"),
    ):
        (tmp_path / "data.json").write_text(text)
        with pytest.raises(UsageError, match=said):
            tune(MODEL, device="cpu", with_data=tmp_path, output=tmp_path / "out")
