"""timm's Swin v1 and v2 on shapes are the real modules, event by event.

Shown with torch 2.13.0 and timm 1.0.31.
"""

from __future__ import annotations

import itertools

import pytest

from planner.core.schema import SwinConfig
from planner.libraries.timm.names import PUBLISHED
from tests.covering import chosen_of, covering
from tests.libraries.steps import (
    Changes,
    assert_equal_to_cpu,
    assert_equal_to_trace,
    name_of,
    needs,
    setting_of,
)

pytestmark = needs("torch", "timm")

# 14x14 tokens in windows of 7, shifted, then 7x7, where the window covers the map.
SMALL = SwinConfig(
    library="timm", image_size=56, depths=(2, 1), num_heads=(3, 6), embed_dim=48, num_classes=10
)
KINDS: tuple[tuple[int, str], ...] = ((1, "eager"), (1, "sdpa"), (2, "eager"))
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
    {"image_size": (60, 76), "drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.0},
    {"image_size": (56, 112), "depths": (1, 2), "drop_path_rate": 0.3, "num_classes": 21841},
    {"image_size": 48, "window_size": 5, "qkv_bias": False},
    {"image_size": 112, "window_size": (7, 14), "depths": (1, 1)},
    {"image_size": 58, "in_channels": 1},
    {"image_size": 28, "patch_size": 2, "depths": (1, 2), "mlp_ratio": 2.0},
    {"num_heads": (1, 2), "image_size": 64, "window_size": 8},
)
# Each value once.
STEPS = chosen_of(
    itertools.product(KINDS, PRECISIONS, ("none", *CHECKPOINTINGS), JOINED, ({}, *SETTINGS)),
)


def small(version: int, changes: Changes) -> SwinConfig:
    return SwinConfig.model_validate({**SMALL.model_dump(), "version": version, **changes})


@pytest.mark.parametrize(
    ("kind", "precision", "checkpointing", "model", "changes"), STEPS, ids=name_of
)
def test_a_step(
    kind: tuple[int, str], precision: str, checkpointing: str, model: Changes, changes: Changes
) -> None:
    version, attention = kind
    asked = {"attention": attention, "precision": precision, "checkpointing": checkpointing}
    assert_equal_to_trace(small(version, model), setting_of({**asked, **changes}))


def test_window_of_pretraining_changes_no_bytes() -> None:
    assert_equal_to_trace(small(2, {"pretrained_window_size": (4, 2)}), setting_of({}))


@pytest.mark.parametrize(
    ("version", "changes"),
    covering([1, 2], [{}, {"batch_size": 1}, {"accumulate": 2, "optimizer": "sgd"}]),
    ids=name_of,
)
def test_real_tensors(version: int, changes: Changes) -> None:
    assert_equal_to_cpu(small(version, {}), setting_of({"precision": "fp32", **changes}))


@pytest.mark.release
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    assert_equal_to_trace(PUBLISHED[name], setting_of({}))
