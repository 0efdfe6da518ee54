"""`find_loader` and `planner data`: the walk over real loaders, and what stops it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchvision")

import torch
from PIL import Image
from torch.utils.data import Dataset, get_worker_info

from planner.cli import main
from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.schema import SwinConfig
from planner.core.schema.record import DataResult, LoaderSetting
from planner.libraries.names import resolve_model
from planner.trainers.emission import emit
from search import loader as loader_file
from search.loader import find_loader, loader_code
from search.tuning.tune import tune
from search.tuning.user_code import check_data
from tests.answers import recommendation_text

HERE = __name__


def make_folder(root: Path, classes: int = 2, each: int = 8, side: int = 24) -> Path:
    """`root/train/CLASS/N.jpg`."""
    for number in range(classes):
        folder = root / "train" / f"class{number}"
        folder.mkdir(parents=True)
        for index in range(each):
            image = Image.new("RGB", (side, side), (number * 20 % 256, index * 30 % 256, 90))
            image.save(folder / f"{index}.jpg", quality=80)
    return root


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_file, "MEASURE_SECONDS", 0.05)


def find(data: str, **options: Any) -> DataResult:
    return find_loader(
        data, batch_size=4, image_size=(16, 16), device="cpu", **{"max_workers": 1, **options}
    )


@pytest.mark.parametrize("pipeline", ["torchvision", "timm"])
def test_a_folder_is_loaded_with_and_without_workers(pipeline: Any, tmp_path: Path) -> None:
    said: list[str] = []
    found = find(str(make_folder(tmp_path)), pipeline=pipeline, on_progress=said.append)
    assert (found.num_items, found.num_classes) == (16, 2)
    assert {run.setting.workers for run in found.runs} == {0, 1}
    assert found.images_per_second >= 0.98 * max(run.images_per_second for run in found.runs)
    assert all(run.cpu_seconds >= 0 for run in found.runs)
    assert any("images/s" in line for line in said)
    assert DataResult.model_validate_json(found.model_dump_json()) == found


class Own(Dataset[Any]):
    """Images, of which `act` says what is wrong in a worker."""

    act = ""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.act == "raise":
            raise ValueError("the label is missing")
        if self.act == "die" and get_worker_info() is not None:
            os._exit(3)
        return torch.zeros(3, 8, 8), index % 10


class Raising(Own):
    act = "raise"


class Dying(Own):
    act = "die"


def test_a_data_set_of_ones_own_is_loaded_by_number() -> None:
    found = find(f"{HERE}:Own")
    assert found.is_factory
    assert found.num_items == 64


def test_an_item_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=r"item \d+ of .*: ValueError: the label is missing"):
        find(f"{HERE}:Raising")
    folder = make_folder(tmp_path, each=1)
    for broken in (folder / "train").rglob("*.jpg"):
        broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(PlannerError, match=rf"{folder}.*\.jpg cannot be decoded"):
        find(str(folder))


def test_workers_that_die_leave_what_loaded_without_them() -> None:
    found = find(f"{HERE}:Dying")
    assert found.setting.workers == 0
    assert any("a worker of the loader died" in note for note in found.notes)


def test_the_walk_goes_on_while_twice_the_workers_gain() -> None:
    rates = {0: 100.0, 1: 90.0, 2: 170.0, 4: 300.0, 8: 310.0, 16: 312.0, 32: 900.0}
    tried: list[LoaderSetting] = []

    class Walk(loader_file._LoaderWalk):
        def measure(self, setting: LoaderSetting) -> float:
            tried.append(setting)
            rate = rates[setting.workers] * (1.2 if setting.prefetch_factor > 2 else 1.0)
            run = loader_file.LoaderRun(
                setting=setting, images_per_second=rate, cpu_seconds=0.01, first_batch_seconds=1
            )
            self.runs = [run, *(r for r in self.runs if r.setting != setting)]
            return rate

    walk = Walk(loader_file.OpenData(Own()), float("inf"), lambda line: None)
    walk.go(LoaderSetting(workers=0, pin_memory=False), 32)
    assert [s.workers for s in tried][:6] == [0, 1, 2, 4, 8, 16]  # not 32
    assert (walk.best.setting.workers, walk.best.setting.prefetch_factor) == (8, 4)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda root: root / "nowhere", "there is no folder"),
        (lambda root: root, "has no pictures in folders of classes"),
        (lambda root: (root / "cats").mkdir() or root, "the class 'cats' .* has no pictures"),
        (lambda root: ((root / "f.jpg").write_bytes(b"") and root) or root / "f.jpg", "is a file"),
    ],
)
def test_what_are_no_data_is_refused_before_torch(make: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        find(str(make(tmp_path)))


def test_the_command_prints_the_loader_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_folder(tmp_path))
    options = ["--batch-size", "4", "--image-size", "16", "--max-workers", "1", "--device", "cpu"]
    assert main(["data", folder, *options]) == 0
    out, err = capsys.readouterr()
    assert "images/s" in out.splitlines()[0]
    assert "worker" in err
    assert main(["data", folder, *options, "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert not err
    found = DataResult.model_validate(json.loads(out))
    assert loader_code(found.setting)[0] == "loader = DataLoader("


# `tune --data`: the emitted script, run for thirty steps on the person's own data.

TINY = SwinConfig(image_size=(28, 28), depths=(1, 1), num_heads=(1, 2), embed_dim=16, num_classes=4)


@pytest.mark.trainers
def test_a_search_ends_with_the_emitted_script_on_the_data(tmp_path: Path) -> None:
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
