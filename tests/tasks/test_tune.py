"""A task and a library's model are tuned on the CPU, and the script that is written trains them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

import search
from planner.core.errors import UnsupportedError
from planner.core.schema import FactoryModel, Model, TrainSetting
from planner.core.schema.result import Recommendation
from planner.libraries.resolve import resolve_model
from planner.trainers.emission import TARGETS, emit, emit_setting
from planner.trainers.plan import Plan
from planner.trainers.task_script import write_task_script

OWN = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Volumes:
        unit = "volumes"

        def module(self):
            return nn.Conv3d(1, 2, 3, padding=1)

        def batch(self, size, device):
            return torch.randn(size, 1, 8, 8, 8), torch.randint(2, (size, 8, 8, 8))

        def loss(self, module, batch):
            return F.cross_entropy(module(batch[0]), batch[1])

    def tokens():
        return nn.Embedding(10, 10)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_volumes.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def need(library: str) -> None:
    """Skips where `library` is not installed."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def tune(model: Model, folder: Path) -> Recommendation:
    return search.tune(
        model, device="cpu", batch_size=[2], trials=1, output=folder,
        restrict={"precision": ["fp32"], "compile": ["off"], "checkpointing": ["none"]},
    )  # fmt: skip


def run(script: str, folder: Path) -> str:
    (folder / "train.py").write_text(script)
    ended = subprocess.run(
        [sys.executable, "train.py", "--steps", "2", "--lr", "0.1", "--log-every", "1",
         "--output", "kept"],
        capture_output=True, text=True, timeout=300, check=False, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert (folder / "kept" / "last.pt").is_file()
    shutil.rmtree(folder / "kept")
    return ended.stdout


def test_a_task_is_tuned_and_its_script_trains(own: Path) -> None:
    found = tune(FactoryModel(factory="own_volumes:Volumes"), own / "tuned")
    assert found.evidence is not None, found.advice
    assert found.evidence.unit == "volumes"
    script = emit(own / "tuned", "pytorch").text
    assert "it yields BATCH_SIZE volumes at a time" in script
    assert "step 2/2  rate" in run(script, own)
    for target in set(TARGETS) - {"pytorch"}:
        with pytest.raises(UnsupportedError, match="--for pytorch"):
            emit(own / "tuned", target)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16", "accumulate": 2, "ema": True, "clip_grad": True},
        *(
            pytest.param(fields, marks=pytest.mark.combinations)
            for fields in (
                {"checkpointing": "blocks", "precision": "fp32"},
                {"checkpointing": "blocks:every-2", "precision": "fp32"},
                {"checkpointing": "selective", "precision": "bf16"},
                {"precision": "fp16", "memory_format": "channels_last", "optimizer": "sgd"},
            )
        ),
    ],
)
@pytest.mark.trainers
def test_the_script_says_the_whole_setting(own: Path, fields: dict[str, object]) -> None:
    need("timm")
    model = resolve_model("torchvision:resnet18", {"image_size": "32", "num_classes": "4"})
    setting = TrainSetting.model_validate({"batch_size": 2, **fields})
    script = emit_setting(model, setting, "pytorch").text
    assert ("checkpoint_as_set(model" in script) is (setting.checkpointing != "none")
    assert "step 2/2  rate" in run(script, own)


@pytest.mark.trainers
def test_the_script_checkpoints_the_blocks_that_the_task_names(own: Path) -> None:
    """Its forward runs again in backward."""
    with (own / "own_volumes.py").open("a") as file:
        file.write(
            textwrap.dedent("""
                class Layer(nn.Conv3d):
                    def forward(self, x):
                        print("backward" if torch._C._current_graph_task_id() != -1 else "forward")
                        return super().forward(x)

                class Named(Volumes):
                    def module(self):
                        return nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), Layer(2, 2, 1))

                    def blocks(self, module):
                        return [module[1]]
            """)
        )
    model = FactoryModel(factory="own_volumes:Named")
    setting = TrainSetting(batch_size=2, precision="fp32", checkpointing="blocks")
    plan = Plan(model, setting, ("planner",), device="cpu", unit="volumes")
    printed = run(write_task_script(plan, "train.py").text, own)
    assert printed.split().count("backward") == printed.split().count("forward") == 2


def test_a_step_that_breaks_in_a_probe_is_told_of_tasks(own: Path) -> None:
    found = tune(FactoryModel(factory="own_volumes:tokens", image_size=(8, 8)), own / "tuned")
    assert found.status == "nothing_fits"
    assert "return a task from the factory" in found.advice
