"""torchvision's Swin v1 and v2 on shapes are the real modules, event by event.

Shown with torch 2.13.0 and torchvision 0.28.0.
"""

from __future__ import annotations

import itertools

import pytest

from planner.core.schema import SwinConfig
from planner.libraries.torchvision.names import PUBLISHED
from tests.covering import chosen_of, covering
from tests.libraries.steps import (
    Changes,
    assert_equal_to_cpu,
    assert_equal_to_trace,
    name_of,
    needs,
    setting_of,
)

pytestmark = needs("torch", "torchvision")

# 14x14 tokens in windows of 7, shifted, then 7x7, where the window covers the map.
SMALL = SwinConfig(
    library="torchvision", image_size=56, depths=(2, 1), num_heads=(1, 2), embed_dim=32,
    num_classes=10,
)  # fmt: skip
PRECISIONS = ("fp32", "bf16", "fp16", "pure-bf16")
CHECKPOINTINGS = ("blocks", "blocks:2", "blocks:every-2", "selective", "stages", "stages:1")
SETTINGS: tuple[Changes, ...] = (
    {"batch_size": 1},
    {"batch_size": 5},
    {"accumulate": 2, "optimizer": "sgd"},
    {"clip_grad": True},
)


# Several changes at once: as many as there are kinds of checkpointing.
JOINED: tuple[Changes, ...] = (
    {"image_size": (60, 76)},
    {"image_size": (56, 112), "drop_path_rate": 0.3, "num_classes": 21841},
    {"image_size": 48, "window_size": 5},
    {"image_size": 28, "drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.0},
    {"image_size": 58},
    {"image_size": 28, "patch_size": 2, "depths": (1, 2), "mlp_ratio": 2.0},
    {"depths": (1, 1, 1), "num_heads": (1, 2, 4)},
)
# Each value once.
STEPS = chosen_of(
    itertools.product((1, 2), PRECISIONS, ("none", *CHECKPOINTINGS), JOINED, ({}, *SETTINGS)),
)


def small(version: int, changes: Changes) -> SwinConfig:
    return SwinConfig.model_validate({**SMALL.model_dump(), "version": version, **changes})


@pytest.mark.parametrize(
    ("version", "precision", "checkpointing", "model", "changes"), STEPS, ids=name_of
)
def test_a_step(
    version: int, precision: str, checkpointing: str, model: Changes, changes: Changes
) -> None:
    asked = {"precision": precision, "checkpointing": checkpointing}
    assert_equal_to_trace(small(version, model), setting_of({**asked, **changes}))


def test_dropout_is_drawn_again_in_recomputation() -> None:
    dropped = {"image_size": (60, 76), "drop_rate": 0.1, "attn_drop_rate": 0.1}
    setting = setting_of({"precision": "fp16", "checkpointing": "blocks"})
    assert_equal_to_trace(small(2, dropped), setting)


# The profiler's events leave out what has 8 bytes or less, so nothing here has.
@pytest.mark.parametrize(
    ("version", "case"),
    covering(
        [1, 2],
        [
            ({}, {}),
            ({"image_size": (60, 76)}, {"accumulate": 2}),
            ({"drop_path_rate": 0.0}, {"batch_size": 1}),
            ({}, {"checkpointing": "blocks"}),
            ({"image_size": (60, 76)}, {"checkpointing": "stages"}),
        ],
    ),
)
def test_real_tensors(version: int, case: tuple[Changes, Changes]) -> None:
    model, changes = case
    config = small(version, {"num_heads": (3, 6), "embed_dim": 48, **model})
    assert_equal_to_cpu(config, setting_of({"precision": "fp32", "batch_size": 3, **changes}))


@pytest.mark.release
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_published_models(name: str, precision: str) -> None:
    assert_equal_to_trace(PUBLISHED[name], setting_of({"precision": precision}))
