"""transformers' Swin v1 and v2 on shapes are the real modules, event by event.

Shown with torch 2.14.1 and transformers 5.24.0.
"""

from __future__ import annotations

import itertools

import pytest

from planner.core.schema import SwinConfig
from planner.libraries.transformers.names import PUBLISHED
from tests.covering import chosen_of, covering
from tests.libraries.steps import (
    Changes,
    assert_equal_to_cpu,
    assert_equal_to_trace,
    name_of,
    needs,
    setting_of,
)

pytestmark = needs("torch", "transformers")

# 14x14 tokens in windows of 7, shifted, then 7x7, where the window covers the map.
SMALL = SwinConfig(
    library="transformers",
    image_size=56,
    depths=(2, 1),
    num_heads=(3, 6),
    embed_dim=48,
    num_classes=10,
)
KINDS: tuple[tuple[int, str], ...] = ((1, "eager"), (1, "sdpa"), (2, "eager"))
PRECISIONS = ("fp32", "bf16", "fp16", "pure-bf16")
CHECKPOINTINGS = (
    "blocks",
    "blocks:2",
    "blocks:every-2",
    "selective",
    "stages",
    "stages:1",
    "nested",
)
SETTINGS: tuple[Changes, ...] = (
    {"batch_size": 1},
    {"batch_size": 5},
    {"accumulate": 2, "optimizer": "sgd"},
    {"clip_grad": True},
)


# Several changes at once: as many as there are kinds of checkpointing.
JOINED: tuple[Changes, ...] = (
    {},
    {"image_size": (60, 76), "drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.0},
    {"image_size": (56, 112), "depths": (1, 2), "drop_path_rate": 0.3, "num_classes": 21841},
    {"image_size": (112, 60), "depths": (1, 1)},
    {"image_size": 58, "in_channels": 1},
    {"image_size": (57, 64), "window_size": 5, "qkv_bias": False},
    {"image_size": 28, "patch_size": 2, "depths": (1, 2), "mlp_ratio": 2.0},
)
# Each value once.
STEPS = chosen_of(
    (
        (kind, precision, checkpointing, *rest)
        for kind, precision, checkpointing, *rest in itertools.product(
            KINDS, PRECISIONS, ("none", *CHECKPOINTINGS), JOINED, ({}, *SETTINGS)
        )
        if kind[0] == 1 or checkpointing != "nested"
    ),
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


def test_dropout_inside_nested_checkpoints() -> None:
    config = small(1, {"image_size": (60, 76), "drop_rate": 0.1, "attn_drop_rate": 0.1})
    setting = setting_of({"attention": "eager", "checkpointing": "nested", "precision": "fp32"})
    assert_equal_to_trace(config, setting)


def test_absolute_positions() -> None:
    """Only version 1 has them that work."""
    config = small(1, {"absolute_position_embedding": True, "drop_rate": 0.1})
    assert_equal_to_trace(config, setting_of({"batch_size": 1}))


@pytest.mark.parametrize("window", [16, 7])
def test_windows_beyond_the_map(window: int) -> None:
    """Version 2 clamps them, by the height only."""
    config = small(2, {"image_size": (48, 96), "window_size": window})
    assert_equal_to_trace(config, setting_of({}))


@pytest.mark.parametrize(
    ("version", "changes"),
    covering([1, 2], [{}, {"batch_size": 1}, {"accumulate": 2, "optimizer": "sgd"}]),
    ids=name_of,
)
def test_real_tensors(version: int, changes: Changes) -> None:
    setting = setting_of({"precision": "fp32", "attention": "eager", **changes})
    assert_equal_to_cpu(small(version, {}), setting)


@pytest.mark.release
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    assert_equal_to_trace(PUBLISHED[name], setting_of({}))
