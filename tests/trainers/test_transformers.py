"""The emitted file, executed: its arguments in the real class, and its Trainer for two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.missing_operators import declare_missing_operators
from planner.trainers.emission import emit_setting
from tests.trainers.cases import FakeEstimator, executed, tiny

declare_missing_operators()
import torch  # noqa: E402


def written(model: SwinConfig, setting: TrainSetting) -> dict[str, Any]:
    """The names that the emitted file defines."""
    text = emit_setting(model, setting, "transformers", estimator=FakeEstimator()).text
    return executed(text)


def test_a_precision_is_its_own_flag_and_the_file_s_own_loss_smooths() -> None:
    setting = TrainSetting(loss="label-smoothing", clip_grad=True)
    for precision, flags in {
        "fp32": [],
        "tf32": ["tf32"],
        "bf16": ["bf16"],
        "fp16": ["fp16"],
    }.items():
        asked = setting.model_copy(update={"precision": precision})
        arguments = written(tiny("transformers"), asked)["ARGUMENTS"]
        assert [name for name in ("bf16", "fp16", "tf32") if arguments.get(name)] == flags
        assert arguments["max_grad_norm"] == 5.0
        assert not arguments.get("label_smoothing_factor")


@pytest.mark.parametrize(
    ("version", "fields"),
    [
        (1, {"checkpointing": "blocks", "optimizer": "sgd", "loss": "soft-target"}),
        (2, {"precision": "pure-bf16", "memory_format": "channels_last"}),
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
