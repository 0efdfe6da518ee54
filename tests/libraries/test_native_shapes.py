"""Our own Swin on shapes, event by event as its module: torch 2.13 on fake and on CPU tensors."""

from __future__ import annotations

import pytest

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.native.names import PUBLISHED
from tests.covering import covering
from tests.libraries.steps import (
    Changes,
    assert_equal_to_cpu,
    assert_equal_to_trace,
    name_of,
    setting_of,
)

SMALL = SwinConfig(
    library="native",
    image_size=(56, 56),
    depths=(2, 1),
    num_heads=(3, 6),
    embed_dim=48,
    num_classes=10,
)
PADDED = SMALL.model_copy(update={"image_size": (60, 76)})  # 15 x 19 tokens, windows of 7


def config_of(version: int, padded: bool, **changes: object) -> SwinConfig:
    base = PADDED if padded else SMALL
    return base.model_copy(update={"version": version, **changes})


MATRIX = covering(
    (1, 2), ("fp32", "bf16", "fp16"), ("eager", "sdpa"),
    ("none", "blocks", "stages", "blocks:2", "blocks:every-2", "selective"), (False, True),
)  # fmt: skip


@pytest.mark.parametrize(
    ("version", "precision", "attention", "checkpointing", "padded"), MATRIX, ids=str
)
def test_a_step_equals_the_module_traced(
    version: int, precision: str, attention: str, checkpointing: str, padded: bool
) -> None:
    setting = setting_of(
        {"precision": precision, "attention": attention, "checkpointing": checkpointing}
    )
    assert_equal_to_trace(config_of(version, padded), setting)


JOINED: list[tuple[Changes, Changes]] = [
    (
        {"drop_rate": 0.1, "attn_drop_rate": 0.1, "qkv_bias": False},
        {"attention": "eager", "batch_size": 1, "zero_grad_to_none": False},
    ),
    (
        {"drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.0, "patch_norm": False},
        {"attention": "sdpa", "checkpointing": "blocks", "batch_size": 5, "accumulate": 2},
    ),
    (
        {"absolute_position_embedding": True, "image_size": (40, 104), "window_size": (5, 4),
         "mlp_ratio": 2.0, "in_channels": 1},
        {"precision": "pure-bf16"},
    ),
    (
        {"depths": (1, 2), "num_heads": (1, 2), "embed_dim": 16, "image_size": (28, 28)},
        {"checkpointing": "stages:0", "memory_format": "channels_last"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("version", "joined"), covering((1, 2), JOINED), ids=name_of)
def test_what_else_a_config_says_is_equal(version: int, joined: tuple[Changes, Changes]) -> None:
    model, setting = joined
    assert_equal_to_trace(config_of(version, padded=False, **model), setting_of(setting))


@pytest.mark.parametrize(
    ("version", "checkpointing", "padded"),
    covering((1, 2), ("none", "blocks", "stages"), (False, True), pairs=[(0, 1)]),
)
def test_phases_equal_the_module_on_real_cpu_tensors(
    version: int, checkpointing: str, padded: bool
) -> None:
    setting = TrainSetting(
        batch_size=2, precision="fp32", attention="eager", checkpointing=checkpointing
    )
    assert_equal_to_cpu(config_of(version, padded), setting)


@pytest.mark.release
@pytest.mark.parametrize("name", list(PUBLISHED))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_published_models_equal_the_module_traced(name: str, precision: str) -> None:
    assert_equal_to_trace(PUBLISHED[name], TrainSetting(batch_size=2, precision=precision))
