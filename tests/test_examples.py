"""Each example runs, as a person would run it; and a line of docs/your-own-model.md does."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planner.core.schema import FactoryModel, TrainSetting

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, folder: Path, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True, text=True, timeout=240, cwd=folder, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_estimate_before_launch(tmp_path: Path) -> None:
    lines = run_example("estimate_before_launch.py", tmp_path).splitlines()
    assert len(lines) == 9
    assert lines[1].endswith(" fits"), "batch 64 of a Swin-T in 24 GiB"
    assert lines[-1].startswith("batch  512  checkpointing blocks")


@pytest.mark.trainers
def test_tune_and_emit(tmp_path: Path) -> None:
    out = run_example("tune_and_emit.py", tmp_path, str(tmp_path / "tuned"))
    assert "fastest of" in out
    script = tmp_path / "tuned" / "train.py"
    ended = subprocess.run(
        [sys.executable, str(script), "--device", "cpu", "--synthetic", "--steps", "1"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


@pytest.mark.emulated
def test_a_step_fits_a_card() -> None:
    """The example test is passed, and skipped where nothing can be emulated."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", str(EXAMPLES / "test_fits.py")],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout


@pytest.mark.trainers
def test_own_model(tmp_path: Path) -> None:
    out = run_example("own_model.py", tmp_path, str(tmp_path / "tuned"))
    assert "images/s at batch" in out
    assert (tmp_path / "tuned" / "recommendation.json").is_file()


@pytest.mark.trainers
@pytest.mark.parametrize(
    ("file", "factory", "library", "unit"),
    [
        ("masked_images.py", "tiny", "transformers", "items"),
        ("video_swin.py", "Tiny", "torchvision", "clips"),
        ("swin_unetr.py", "tiny", "monai", "items"),
        ("swin_segmentation.py", "Tiny", "transformers", "images"),
    ],
)
def test_an_example_of_a_task_trains_and_is_recorded(
    file: str, factory: str, library: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One real step of the tiny form on the CPU, and the same step on an emulated GPU."""
    torch = pytest.importorskip("torch")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    from planner.training.tasks import task_for
    from tests.steps import recorded

    monkeypatch.syspath_prepend(str(EXAMPLES))
    model = FactoryModel(factory=f"{file.removesuffix('.py')}:{factory}")
    setting = TrainSetting(batch_size=3)
    task = task_for(model, setting)
    assert getattr(task, "unit", None) == unit
    module = task.module().train()
    loss = task.loss(module, task.batch(3, torch.device("cpu")))
    loss.backward()
    assert torch.isfinite(loss.detach())
    assert recorded(model, setting).num_parameters == sum(p.numel() for p in module.parameters())


def test_window_attention_is_timed_where_it_is_right() -> None:
    out = run_example("window_attention.py", Path.cwd(), "--device", "cpu", "--seconds", "0.001")
    assert "not timed" not in out
    assert {"explicit", "fused"} <= set(out.split())


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    missing = [file.name for file in EXAMPLES.glob("*.py") if f'"{file.name}"' not in source]
    assert not missing


def test_the_queue_of_the_docs_takes_any_number_of_keys() -> None:
    """Wraps around at the end, so that the step is the same at every batch."""
    page = EXAMPLES.with_name("docs") / "your-own-model.md"
    (line,) = re.findall(r"`(queue\[.*?)`", page.read_text(encoding="utf-8"))
    queue, keys = torch.zeros(1, 10), torch.tensor([[1.0], [2.0], [3.0]])
    exec(line, {"torch": torch, "queue": queue, "K": 10, "pointer": 8, "n": 3, "keys": keys})
    assert queue.tolist() == [[3, 0, 0, 0, 0, 0, 0, 0, 1, 2]]
