"""The hook in each trainer, really run on the CPU with a tiny model."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import planner
from planner.core.schema import TrainSetting
from planner.libraries.building import declare_missing_operators
from planner.programs.watch import Watch
from tests.trainers.cases import recommendation, run_here, tiny

pytestmark = pytest.mark.trainers
declare_missing_operators()  # of torchvision, which trainers import
BATCH, IMAGES, CLASSES = 4, 32, 4
STEPS = IMAGES // BATCH


class counted(Watch):  # noqa: N801
    """The images of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def step(self, images: int | None = None) -> None:
        self.steps.append(images or self._pending)
        super().step(images)


def test_transformers(tmp_path: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

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
        gradient_accumulation_steps=2, report_to=[], use_cpu=True, eval_strategy="epoch",
        disable_tqdm=True,
    )  # fmt: skip
    with counted() as watch:
        trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=data[:8],
                          callbacks=[watch.callback(TrainerCallback)])  # fmt: skip
        trainer.train()
    assert watch.steps == [2 * BATCH] * 2 * STEPS


def test_lightning(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, CLASSES)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            images, targets = batch
            return nn.functional.cross_entropy(self.inner(images), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    data = TensorDataset(torch.randn(IMAGES, 8), torch.randint(CLASSES, (IMAGES,)))
    with counted() as watch:
        trainer = pl.Trainer(
            max_epochs=4, accumulate_grad_batches=2, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, callbacks=[watch.callback(pl.Callback)],
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(data, BATCH))
    assert watch.steps == [2 * BATCH] * (4 * STEPS // 2)


def test_the_emitted_script_is_watched_and_profiled_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = TrainSetting(batch_size=4, accumulate=2, precision="fp32")
    plan = recommendation(tiny(), setting)
    plan = plan.model_copy(update={"device": plan.device.model_copy(update={"kind": "cpu"})})
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    emitted = planner.emit(plan, "pytorch")
    run_here(emitted, tmp_path, "--synthetic", "--steps", "8", "--watch", "plan.json",
             "--profile", "TRACED")  # fmt: skip
    traced = json.loads(gzip.decompress((tmp_path / "TRACED/trace.json.gz").read_bytes()))
    names = [str(event.get("name")) for event in traced["traceEvents"]]
    assert names.count("aten::convolution_backward") == 3 * setting.accumulate  # steps 3 to 5
    (line, *_) = capsys.readouterr().err.splitlines()
    assert re.match(r"planner.watch: step 8: [\d.]+ images/s \(plan: 1,280\), \d+% waiting", line)
