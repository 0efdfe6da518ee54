"""accelerate, Lightning, DeepSpeed and mmengine: their files in the real library, or by key."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import TrainSetting
from planner.libraries.missing_operators import declare_missing_operators
from planner.trainers.emission import emit_setting
from tests.trainers.cases import FakeEstimator, executed, tiny
from tests.trainers.keys import DEEPSPEED_KEYS

declare_missing_operators()
import torch  # noqa: E402

SETTING = TrainSetting(
    batch_size=8,
    accumulate=4,
    precision="bf16",
    checkpointing="blocks",
    compile="max-autotune-no-cudagraphs",
)


def emitted(target: str, **fields: Any) -> Any:
    setting = SETTING.model_copy(update=fields)
    return emit_setting(tiny("torchvision"), setting, target, estimator=FakeEstimator())


def test_accelerate_reads_its_file(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "accelerate.yaml"
    result = emitted("accelerate", world_size=2)
    file.write_text(result.text)
    config = load_config_from_file(str(file))
    assert config.mixed_precision == "bf16"
    assert config.num_processes == 2
    assert config.dynamo_config["dynamo_mode"] == "max-autotune-no-cudagraphs"
    assert "gradient_accumulation" not in file.read_text().split("compute_environment")[1]
    assert result.launch.startswith("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 accelerate launch")


# A warning of a class of Lightning's makes the process that gathers reports import Lightning, which
# cannot be imported beside this torch before its missing operators are declared.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("precision", "optimizer"), [("pure-bf16", "adamw"), ("bf16", "adamw-fused")]
)
def test_lightning_trains(precision: str, optimizer: str, tmp_path: Path) -> None:
    """Clipped: Lightning itself clips no fused optimizer under autocast."""
    import lightning

    fields = {"precision": precision, "optimizer": optimizer}
    result = emitted("lightning", **fields, compile="off", clip_grad=True)
    names = executed(result.text)
    known = inspect.signature(lightning.Trainer.__init__).parameters
    assert set(names["TRAINER"]) <= set(known)
    trainer = lightning.Trainer(
        **names["TRAINER"], accelerator="cpu", max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(tmp_path),
    )  # fmt: skip
    assert trainer.accumulate_grad_batches == 4
    data = [(torch.randn(3, 32, 32), i % 10) for i in range(16)]
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    module = names["Training"]()
    before = [p.detach().clone() for p in module.parameters()]
    trainer.fit(module, loader)
    assert trainer.global_step == 2
    assert any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_deepspeed_has_the_keys_it_knows() -> None:
    result = emitted("deepspeed", world_size=2)
    config = json.loads(result.text)
    assert set(config) <= DEEPSPEED_KEYS[""]
    assert set(config["torch_autocast"]) <= DEEPSPEED_KEYS["torch_autocast"]
    # DeepSpeed's own law: global = micro × accumulation × world.
    assert config["train_batch_size"] == 8 * 4 * 2
    assert "bf16" not in config, "that would convert the model"
    assert "activation_checkpointing" not in config
    assert any("activation_checkpointing block does nothing" in w for w in result.warnings)
    assert any("max-autotune-no-cudagraphs" in warning for warning in result.warnings)
    assert "build_optimizer" in executed(result.code)
