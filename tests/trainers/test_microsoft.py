"""The YAML in yacs, merged into the key tree of the authors' config.py."""

from pathlib import Path
from typing import Any

import pytest
from yacs.config import CfgNode

from planner.core.schema import SwinConfig, TrainSetting
from planner.trainers.emission import emit, emit_setting
from tests.trainers.cases import recommendation, tiny
from tests.trainers.keys import microsoft_config


def merged(model: SwinConfig, folder: Path, **fields: Any) -> CfgNode:
    """config.py's defaults with the emitted file over them, as its update_config does."""
    model = model.model_copy(update={"num_classes": 1000})
    setting = TrainSetting(**{"batch_size": 16, "precision": "fp16", **fields})
    file = folder / "swin.yaml"
    file.write_text(emit_setting(model, setting, "microsoft").text)
    config = CfgNode(microsoft_config())
    config.merge_from_file(str(file))
    return config


@pytest.mark.parametrize("version", [1, 2])
def test_every_key_is_config_py_s(version: int, tmp_path: Path) -> None:
    model = tiny("microsoft", version, drop_path_rate=0.3)
    config = merged(
        model, tmp_path, accumulate=4, checkpointing="blocks", clip_grad=True,
        loss="soft-target",
    )  # fmt: skip
    assert config.DATA.BATCH_SIZE == 16
    assert config.DATA.IMG_SIZE == 32
    assert config.TRAIN.ACCUMULATION_STEPS == 4
    assert config.TRAIN.USE_CHECKPOINT is True
    assert config.TRAIN.OPTIMIZER.NAME == "adamw"
    assert config.TRAIN.WEIGHT_DECAY == 0.05
    assert config.TRAIN.CLIP_GRAD == 5.0
    assert config.AMP_ENABLE is True
    wanted = {1: "swin", 2: "swinv2"}[version]
    assert wanted == config.MODEL.TYPE
    assert config.MODEL.DROP_PATH_RATE == 0.3
    assert config.MODEL.NUM_CLASSES == 1000
    shape = config.MODEL.SWIN if version == 1 else config.MODEL.SWINV2
    assert shape.WINDOW_SIZE == 4
    assert shape.DEPTHS == [2, 2]
    assert merged(model, tmp_path, precision="fp32").AMP_ENABLE is False


def test_main_py_s_gradient_buckets_are_counted_even_for_the_setting_that_was_probed() -> None:
    """main.py wraps the model in DDP on one device too, which a probe does not."""
    found = recommendation(
        tiny("microsoft", num_classes=1000), TrainSetting(batch_size=16, precision="fp16")
    )
    emitted = emit(found, "microsoft")
    assert "main.py trains under DDP" in " ".join(emitted.text.split())
