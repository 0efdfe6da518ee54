"""The hook in each trainer, really run on the CPU with a tiny model."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.core.schema import TrainSetting
from planner.libraries.missing_operators import declare_missing_operators
from tests.trainers.cases import recommendation, tiny
from tests.watching.loops import BATCH, CLASSES, IMAGES, Loop, end, events, lines, loader, of_kind

declare_missing_operators()  # of torchvision, which trainers import
STEPS = IMAGES // BATCH


def counted_images(folder: Path) -> int:
    last = end(folder)["steady"]
    assert isinstance(last["images"], int)
    return last["images"] // int(last["steps"])


def test_transformers(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from planner.watching.transformers import WatchCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, CLASSES)

        def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            logits = self.head(pixel_values)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"pixel_values": torch.randn(8), "labels": i % CLASSES} for i in range(2 * IMAGES)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=BATCH, num_train_epochs=2,
        gradient_accumulation_steps=2, report_to=[], use_cpu=True, logging_steps=1,
        eval_strategy="epoch", disable_tqdm=True,
    )  # fmt: skip
    hook = WatchCallback(folder=tmp_path, interval_seconds=0)
    trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=data[:8],
                      callbacks=[hook])  # fmt: skip
    trainer.train()
    assert end(tmp_path)["status"] == "finished"
    assert end(tmp_path)["step"] == 2 * STEPS
    assert counted_images(tmp_path) == 2 * BATCH
    last = of_kind(tmp_path, "interval")[-1]
    assert last["micro_steps"] == 2
    assert last["loss"] > 0
    assert 0 < last["wait_share"] <= 1
    assert end(tmp_path)["steady"]["paused_seconds"] > 0
    copy.deepcopy(hook).on_step_end(arguments, trainer.state, trainer.control)
    assert end(tmp_path)["step"] == 2 * STEPS


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch as pl

    from planner.watching.lightning import WatchCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Loop().model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if os.environ.get("FAIL_AT") == str(index):
                raise MemoryError("no room")
            images, targets = batch
            return nn.functional.cross_entropy(self.inner(images), targets)

        def validation_step(self, batch: Any, index: int) -> None:
            self.inner(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(folder: Path, timed: bool) -> None:
        hook = WatchCallback(folder=folder, interval_seconds=0)
        trainer = pl.Trainer(
            max_epochs=4, accumulate_grad_batches=2, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, callbacks=[hook],
        )  # fmt: skip
        data = loader()
        trainer.fit(Module(), hook.time(data) if timed else data, loader())

    for timed in (True, False):
        folder = tmp_path / str(timed)
        fit(folder, timed)
        assert end(folder)["status"] == "finished"
        assert end(folder)["step"] == 4 * STEPS // 2
        last = of_kind(folder, "interval")[-1]
        assert last["micro_steps"] == 2
        assert last["images"] == 2 * BATCH
        assert last["loss"] > 0
        assert ("wait_share" in last) == timed
    monkeypatch.setenv("FAIL_AT", "3")
    with pytest.raises(MemoryError, match="no room"):
        fit(tmp_path / "failed", timed=True)
    assert end(tmp_path / "failed")["status"] == "MemoryError"
    assert events(tmp_path / "failed") == ["out of memory"]


def test_accelerate(tmp_path: Path) -> None:
    from accelerate import Accelerator

    loop = Loop()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, data = accelerator.prepare(loop.model, loop.optimizer, loader())
    with planner.watch(folder=tmp_path, interval_seconds=0) as watched:
        watched.follow(optimizer)
        for _ in range(3):
            for images, targets in watched.batches(data):
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(images), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
    assert end(tmp_path)["step"] == 3 * STEPS // 2
    last = of_kind(tmp_path, "interval")[-1]
    assert (last["images"], last["micro_steps"]) == (2 * BATCH, 2)


# What timm's train.py does with timm and torch, without its arguments.
LIKE_TRAIN = """
import sys, torch
from PIL import Image
from timm.data import create_loader

class Pictures(torch.utils.data.Dataset):
    transform = None
    def __len__(self): return 32
    def __getitem__(self, index): return self.transform(Image.new("RGB", (8, 8))), 0

assert __name__ == "__main__" and sys.argv[1:] == ["--epochs", "2"]
train = create_loader(Pictures(), 8, 4, is_training=True, num_workers=0, use_prefetcher=False)
valid = create_loader(Pictures(), 8, 4, is_training=False, num_workers=0, use_prefetcher=False)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    for index, (images, targets) in enumerate(train):
        torch.nn.functional.cross_entropy(model(images), targets).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    list(valid)
"""


@pytest.mark.trainers
def test_timms_script_runs_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LIKE_TRAIN)
    done = subprocess.run(
        [sys.executable, "-m", "planner.watching.timm", "--log", str(tmp_path), str(script),
         "--epochs", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert end(tmp_path)["status"] == "finished"
    assert end(tmp_path)["step"] == 2 * STEPS // 2
    assert counted_images(tmp_path) == 2 * BATCH
    assert lines(tmp_path)[0]["versions"]["timm"]
    assert "faults" not in end(tmp_path)


@pytest.mark.trainers
def test_the_emitted_script_is_watched_on_request(tmp_path: Path) -> None:
    setting = TrainSetting(batch_size=4, accumulate=2, precision="fp32")
    plan = recommendation(tiny(), setting)
    plan = plan.model_copy(update={"device": plan.device.model_copy(update={"kind": "cpu"})})
    emitted = planner.emit(plan, "pytorch")
    for name, text in {"train.py": emitted.text, **emitted.beside}.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "train.py", "--synthetic", "--steps", "8", "--watch", "RUN"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "planner.watch" not in done.stderr
    last = end(tmp_path / "RUN")
    assert (last["status"], last["step"]) == ("finished", 8)
    assert last["steady"]["images"] == 3 * 8
    assert last["steady"]["micro_steps"] == 3 * 2
