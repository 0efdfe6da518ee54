"""Saved activations in the host's memory, in the files of those trainers that hold a forward."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from planner.libraries.resolve import resolve_model
from planner.schema import TrainSetting
from planner.trainers.emission import emit_setting
from tests.libraries.steps import needs
from tests.trainers.cases import FakeEstimator, tiny
from tests.trainers.test_pytorch import run_here

CONFIG = Path(__file__).parents[2] / "pyproject.toml"
SETTING = TrainSetting(batch_size=2, precision="fp32", offload="activations", attention="eager")


@pytest.mark.parametrize("target", ["pytorch", "lightning", "accelerate", "deepspeed"])
def test_the_context_is_written_out(target: str, tmp_path: Path) -> None:
    """A copy of the planner's own, around forward and loss."""
    found = emit_setting(tiny("torchvision"), SETTING, target, estimator=FakeEstimator())
    text = found.text + found.code
    assert "\ndef offload_activations(" in text
    assert "with offload_activations(kept):" in text
    assert "planner.offloading" not in text
    python = tmp_path / "emitted.py"
    python.write_text(found.code or found.text)
    for check in (["check"], ["format", "--check"]):
        ended = subprocess.run(
            [sys.executable, "-m", "ruff", *check, "--config", str(CONFIG), str(python)],
            capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout
    plain = SETTING.model_copy(update={"offload": "none"})
    without = emit_setting(tiny("torchvision"), plain, target, estimator=FakeEstimator())
    assert "offload" not in without.text + without.code


@needs("torch", "timm")
def test_the_script_of_a_task_runs(tmp_path: Path) -> None:
    model = resolve_model("timm:resnet18", {"image_size": (64, 64), "num_classes": 10})
    plain = SETTING.model_copy(update={"attention": "library"})
    text = emit_setting(model, plain, "pytorch", estimator=FakeEstimator()).text
    assert "with offload_activations(kept):" in text
    ended = run_here(text, tmp_path, "--steps", "1", "--log-every", "1")
    assert ended.returncode == 0, ended.stderr
    assert "step 1/1  loss" in ended.stdout
