"""`tune --data`: the emitted script, run for thirty steps on the person's own data."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")

from planner.core.errors import UnsupportedError, UsageError
from planner.core.schema import SwinConfig
from planner.libraries.resolve import resolve_model
from planner.trainers.emission import emit
from search import loader as loader_file
from search.tuning.feeding import check_data
from search.tuning.tune import tune
from tests.answers import recommendation_text
from tests.search.test_loader import make_folder

TINY = SwinConfig(image_size=(28, 28), depths=(1, 1), num_heads=(1, 2), embed_dim=16, num_classes=4)


@pytest.mark.trainers
def test_a_search_ends_with_the_emitted_script_on_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_file, "MEASURE_SECONDS", 0.05)
    data = make_folder(tmp_path / "data", each=20)
    found = tune(
        TINY, device="cpu", trials=1, batch_size=4, data=str(data), output=tmp_path / "run",
        restrict={"precision": ["fp32"], "compile": ["off"], "checkpointing": ["none"]},
        estimator=None,
    )  # fmt: skip
    fed = found.feeding
    assert fed is not None, found.notes
    assert fed.steps == 30, fed.notes
    assert fed.images_per_second
    assert fed.waited is not None
    assert 0 <= fed.waited <= 1
    said = recommendation_text(found)
    assert f"Fed from {data}" in said
    assert "waiting for data" in said
    ran = (tmp_path / "run/fed/train.py").read_text()
    again = emit(tmp_path / "run", "pytorch").text
    assert again.partition("@dataclass")[2] == ran.partition("@dataclass")[2]


def test_data_that_the_model_does_not_take_are_refused(tmp_path: Path) -> None:
    data = str(make_folder(tmp_path, classes=5, each=1))
    with pytest.raises(UsageError, match=r"5 classes, and .* only 4"):
        check_data(data, TINY, is_task=False)
    with pytest.raises(UsageError, match="1 channels"):
        check_data(data, TINY.model_copy(update={"in_channels": 1}), is_task=False)
    detector = resolve_model("torchvision:fasterrcnn_resnet50_fpn")
    with pytest.raises(UnsupportedError, match="makes batches of its own"):
        check_data(data, detector, is_task=False)
