"""The emitted file, executed: its arguments in the real class, and its Trainer for two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.missing_operators import declare_missing_operators
from planner.trainers.emission import emit_setting
from planner.trainers.plan import Plan
from planner.trainers.transformers import training_arguments
from tests.trainers.cases import FakeEstimator, executed, tiny

declare_missing_operators()
import torch  # noqa: E402
import transformers  # noqa: E402
import transformers.training_args as training_args  # noqa: E402


@pytest.fixture
def no_device_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16, fp16 and tf32 ask for a GPU and nothing else here stands in for one: the two questions
    about the device are answered yes, everything else of TrainingArguments stays as it is."""
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True, raising=False)
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True, raising=False)
    monkeypatch.setattr(training_args, "enable_tf32", lambda on: None, raising=False)


def written(model: SwinConfig, setting: TrainSetting) -> dict[str, Any]:
    """The names that the emitted file defines."""
    text = emit_setting(model, setting, "transformers", estimator=FakeEstimator()).text
    return executed(text)


@pytest.mark.usefixtures("no_device_check")
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("fp32", "adamw"), ("tf32", "rmsprop"), ("bf16", "adamw-fused"), ("fp16", "lion")],
)
def test_the_arguments_load_in_the_real_class(
    precision: str, optimizer: str, tmp_path: Path
) -> None:
    setting = TrainSetting(
        batch_size=8, accumulate=4, precision=precision, optimizer=optimizer, clip_grad=True,
        checkpointing="nested", loss="label-smoothing", validation_batch_size=16,
    )  # fmt: skip
    arguments = written(tiny("transformers"), setting)["ARGUMENTS"]
    assert arguments == training_arguments(Plan(tiny("transformers"), setting, ()))
    loaded = transformers.TrainingArguments(str(tmp_path), **arguments)
    assert (loaded.per_device_train_batch_size, loaded.gradient_accumulation_steps) == (8, 4)
    assert loaded.bf16 is (precision == "bf16")
    assert loaded.fp16 is (precision == "fp16")
    assert loaded.tf32 is {"fp32": False, "tf32": True}.get(precision)
    assert loaded.activation_checkpointing is True
    assert loaded.max_grad_norm == 5.0
    assert loaded.label_smoothing_factor == 0, "the file's own loss smooths, over the whole step"
    assert loaded.per_device_eval_batch_size == 16


@pytest.mark.parametrize(
    ("version", "fields"),
    [
        (1, {"checkpointing": "blocks", "optimizer": "sgd", "loss": "soft-target"}),
        (2, {"precision": "pure-bf16", "memory_format": "channels_last", "amsgrad": True}),
    ],
)
def test_the_trainer_trains(version: int, fields: dict[str, Any], tmp_path: Path) -> None:
    """Two optimizer steps of the real Trainer. On the CPU: `use_cpu` and fp32 stand in for bf16."""
    model = tiny("transformers", version)
    setting = TrainSetting(batch_size=2, accumulate=2, **{"precision": "fp32", **fields})
    names = written(model, setting)
    dataset = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 10} for i in range(8)]
    more: dict[str, Any] = {"use_cpu": True, "max_steps": 2, "report_to": "none"}
    if not setting.optimizer.startswith("adam"):
        more["learning_rate"] = 1e-3  # there is no published one
    more |= {"dataloader_num_workers": 0, "dataloader_persistent_workers": False}
    more |= {"dataloader_prefetch_factor": None}
    more |= {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    more |= {"eval_strategy": "no", "load_best_model_at_end": False}
    trainer = names["build_trainer"](dataset, dataset[:3], str(tmp_path), **more)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(2.0 < loss < 3.0 for loss in losses), "ln 10 = 2.3: accumulation is averaged, once"
    moved = [not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)]
    assert any(moved)
    assert sum(len(batch["labels"]) for batch in trainer.get_eval_dataloader()) == 3
    assert 0 <= trainer.evaluate()["eval_accuracy"] <= 1
