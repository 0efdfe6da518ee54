"""The measured loader in every trainer's own words: written, or said to be otherwise."""

from __future__ import annotations

import argparse
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.core.schema import SwinConfig, TrainSetting
from planner.core.schema.loading import PIPELINES, LoaderSetting
from planner.libraries.missing_operators import declare_missing_operators
from planner.trainers.emission import TARGETS, Emitted, emit, emit_setting
from planner.trainers.loader import EVERY_FIELD
from planner.trainers.registry import TRAINERS
from tests.trainers.cases import (
    FakeEstimator,
    executed,
    feeding,
    recommendation,
    tiny,
)
from tests.trainers.test_pytorch import run_here

declare_missing_operators()
import torch  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/trainers.md"

LIBRARIES = {"timm": "timm", "transformers": "transformers"}
ODD = {"workers": 1, "prefetch_factor": 3, "pin_memory": False}
"""What no trainer does by itself."""


def model_for(target: str) -> SwinConfig:
    """Of the trainer's library, with classes that all can train."""
    return tiny(LIBRARIES.get(target, "native"), num_classes=1000)


def emitted(target: str, loader: LoaderSetting, world_size: int = 1, **fed: Any) -> Emitted:
    setting = TrainSetting(batch_size=4, accumulate=2, precision="fp32", world_size=world_size)
    found = recommendation(model_for(target), setting, feeding=feeding(loader, **fed))
    return emit(found, target, estimator=FakeEstimator())


def words(target: str, result: Emitted) -> dict[str, Any]:
    """What the trainer is told of its loader, in its own words."""
    if target in ("timm", "microsoft"):
        values = yaml.safe_load(result.text)
        return dict(values) if target == "timm" else dict(values["DATA"])
    names = executed(result)
    if target == "transformers":
        return dict(names["ARGUMENTS"])
    if target == "mmengine":
        return dict(names["train_dataloader"])
    return dict(names["LOADER"])


DATA_LOADER = {
    "workers": "num_workers", "prefetch_factor": "prefetch_factor", "pin_memory": "pin_memory",
    "persistent_workers": "persistent_workers",
}  # fmt: skip
WORDS: dict[str, dict[str, str]] = {
    # A field of LoaderSetting, and what the trainer calls it.
    "timm": {"workers": "workers", "pin_memory": "pin_mem"},
    "microsoft": {"workers": "NUM_WORKERS", "pin_memory": "PIN_MEMORY"},
    "transformers": {field: f"dataloader_{name}" for field, name in DATA_LOADER.items()},
    **dict.fromkeys(("accelerate", "lightning", "deepspeed", "mmengine"), DATA_LOADER),
    "pytorch": {field: f"--{field.replace('_', '-')}" for field in DATA_LOADER},
}


@pytest.mark.parametrize("target", TARGETS)
def test_every_field_is_written_or_said_to_be_otherwise(target: str) -> None:
    """In the plain script they are the defaults of its flags."""
    loader = LoaderSetting(**ODD)
    result = emitted(target, loader)
    for name in ODD:
        said = [w for w in result.warnings if f"has no {name}" in w]
        if name in TRAINERS[target].loads_by_itself:
            own = TRAINERS[target].loads_by_itself[name]
            assert len(said) == (own != ODD[name]), name
            assert all("--for pytorch" in warning for warning in said)
            continue
        assert not said
        if target == "pytorch":
            flag = WORDS[target][name]
            line = next(line for line in result.text.splitlines() if f'"{flag}"' in line)
            assert f"default={ODD[name]}" in line
        else:
            assert words(target, result)[WORDS[target][name]] == ODD[name], name


@pytest.mark.parametrize("target", TARGETS)
def test_the_file_says_where_the_loader_s_figures_come_from(target: str) -> None:
    text = " ".join(emitted(target, LoaderSetting(**ODD)).text.replace("#", " ").split())
    text = text.replace("\\u00d7", "×").replace('", "', " ")
    assert "Loader: torchvision, 1 worker, prefetch 3, measured at 812.3 images/s" in text
    assert "on 16 processors, bound by its processors" in text
    setting = TrainSetting(batch_size=4, precision="fp32")
    plain = emit_setting(model_for(target), setting, target, estimator=FakeEstimator())
    assert "Loader: not measured" in plain.text
    assert "It has 8 workers, as Swin's authors use" in " ".join(
        plain.text.replace("#", " ").split()
    )


def test_the_script_trains_on_a_data_set_of_ones_own(tmp_path: Path) -> None:
    """The factory's DataLoader gives its data set and its collation; the rest is the setting's."""
    (tmp_path / "own_items.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader, default_collate\n\n\n"
        "def collate(items):\n    print('collated')\n    return default_collate(items)\n\n\n"
        "def make_data():\n    items = [(torch.zeros(3, 32, 32), n) for n in range(10)]\n"
        "    return DataLoader(items, batch_size=1, collate_fn=collate)\n"
    )
    loader = LoaderSetting(pipeline="own", workers=0, pin_memory=False)
    result = emitted("pytorch", loader, location="own_items:make_data")
    ended = run_here(result.text, tmp_path, "--steps", "3", "--log-every", "1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("collated") == 6, "3 steps of 2 batches, 2 an epoch"
    assert "waited for data" in ended.stdout


def test_a_rate_of_another_pipeline_is_not_passed_off() -> None:
    for target, trainer in TRAINERS.items():
        own = [name for name in PIPELINES if name in trainer.pipelines]
        other = next((name for name in PIPELINES if name not in own), None)
        for pipeline in filter(None, (*own[:1], other)):
            result = emitted(target, LoaderSetting(pipeline=pipeline))
            said = [w for w in result.warnings if "measured" in w and "reads pictures" in w]
            assert len(said) == (pipeline == other), (target, pipeline)


def test_the_page_says_how_each_trainer_loads() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, trainer in TRAINERS.items():
        own = [f"`{WORDS[name][field]}`" for field in EVERY_FIELD if field in WORDS[name]]
        fixed = [f"{f} is {str(v).lower()}" for f, v in trainer.loads_by_itself.items()]
        line = f"- **Loader**: {', '.join([*own, *fixed])}."
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert line in re.sub(r"\s+", " ", section), line
        assert trainer.reads is None or trainer.reads in re.sub(r"\s+", " ", section)


def in_script(name: str, rank: int = 0, **fields: Any) -> Any:
    """A class or function of the plain script of four images a batch."""
    setting = TrainSetting(batch_size=4, precision="fp32", **fields)
    text = emit_setting(model_for("pytorch"), setting, "pytorch", estimator=FakeEstimator()).text
    names = executed(text)
    return names[name]


def test_no_worker_starts_over_between_two_epochs() -> None:
    """One iterator of the DataLoader gives batch after batch of many epochs."""
    training_loader, on_device, waits = (
        in_script(name) for name in ("training_loader", "on_device", "Waits")
    )
    device = torch.device("cpu")
    options = argparse.Namespace(
        workers=1, prefetch_factor=3, pin_memory=True, persistent_workers=True, device="cpu", seed=0
    )
    items = [(torch.full((3, 2, 2), float(number)), number) for number in range(10)]
    loader = training_loader(options, 0, (items, None), 0)
    waited = waits(device)
    batches = list(itertools.islice(on_device(loader, device, False, waited), 5))
    seen = [number for _, targets in batches for number in targets.tolist()]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)), "two epochs in five batches"
    assert all(len(images) == 4 for images, _ in batches), "and no smaller batch"
    assert waited.seconds() > 0
    assert waited.marks == []
