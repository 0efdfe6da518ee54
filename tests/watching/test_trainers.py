"""The hook in each trainer, really run on the CPU with a tiny model."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.core.schema import TrainSetting
from planner.libraries.building import declare_missing_operators
from tests.trainers.cases import recommendation, run_here, tiny
from tests.watching.loops import BATCH, CLASSES, IMAGES, Loop, end, events, loader, of_kind

pytestmark = pytest.mark.trainers
declare_missing_operators()  # of torchvision, which trainers import
STEPS = IMAGES // BATCH


def counted_images(folder: Path) -> int:
    last = end(folder)["steady"]
    assert isinstance(last["images"], int)
    return last["images"] // int(last["steps"])


def test_transformers(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from planner.watching.callbacks import transformers_callback

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
    hook = transformers_callback(folder=tmp_path, interval_seconds=0)
    trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=data[:8],
                      callbacks=[hook])  # fmt: skip
    trainer.train()
    assert end(tmp_path)["status"] == "finished"
    assert end(tmp_path)["step"] == 2 * STEPS
    assert counted_images(tmp_path) == 2 * BATCH
    assert of_kind(tmp_path, "interval")[-1]["loss"] > 0


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch as pl

    from planner.watching.callbacks import lightning_callback

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

    def fit(folder: Path) -> None:
        hook = lightning_callback(folder=folder, interval_seconds=0)
        trainer = pl.Trainer(
            max_epochs=4, accumulate_grad_batches=2, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, callbacks=[hook],
        )  # fmt: skip
        trainer.fit(Module(), loader(), loader())

    fit(tmp_path)
    assert end(tmp_path)["status"] == "finished"
    assert end(tmp_path)["step"] == 4 * STEPS // 2
    last = of_kind(tmp_path, "interval")[-1]
    assert last["images"] == last["steps"] * 2 * BATCH
    assert last["loss"] > 0
    monkeypatch.setenv("FAIL_AT", "3")
    with pytest.raises(MemoryError, match="no room"):
        fit(tmp_path / "failed")
    assert end(tmp_path / "failed")["status"] == "MemoryError"
    assert events(tmp_path / "failed") == ["out of memory"]


def test_the_emitted_script_is_watched_and_profiled_on_request(tmp_path: Path) -> None:
    setting = TrainSetting(batch_size=4, accumulate=2, precision="fp32")
    plan = recommendation(tiny(), setting)
    plan = plan.model_copy(update={"device": plan.device.model_copy(update={"kind": "cpu"})})
    emitted = planner.emit(plan, "pytorch")
    run_here(emitted, tmp_path, "--synthetic", "--steps", "8", "--watch", "RUN",
             "--profile", "TRACED")  # fmt: skip
    traced = json.loads(gzip.decompress((tmp_path / "TRACED/trace.json.gz").read_bytes()))
    names = [str(event.get("name")) for event in traced["traceEvents"]]
    assert names.count("aten::convolution_backward") == 3 * setting.accumulate  # steps 3 to 5
    last = end(tmp_path / "RUN")
    assert (last["status"], last["step"]) == ("finished", 8)
    assert last["steady"]["images"] == 3 * 8
    assert last["steady"]["micro_steps"] == 3 * 2
