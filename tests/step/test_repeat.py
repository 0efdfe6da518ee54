"""The second step that is read off the first is the one that a second step records."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import UnsupportedError
from planner.estimation import choose
from planner.ledger import Allocated, Freed
from planner.step import training
from planner.step.repeat import repeated
from planner.step.training import Training, record_training
from tests.building import on_shapes

SMALL = {"image_size": (56, 56), "depths": (2, 2), "num_heads": (1, 2), "embed_dim": 32}
NAMES = (
    "native:swin_tiny", "timm:swin_tiny_patch4_window7_224", "torchvision:swin_t",
    "transformers:microsoft/swin-tiny-patch4-window7-224",
    "microsoft:swin_tiny_patch4_window7_224",
)  # fmt: skip
SETTINGS: tuple[dict[str, Any], ...] = (
    {"accumulate": 2, "checkpointing": "blocks"},
    {"precision": "fp16"},
    {"optimizer": "adamw-fused", "checkpointing": "blocks:3", "ema": True},
    {"optimizer": "adafactor", "clip_grad": True, "validation_batch_size": 8},
    {"optimizer": "lion", "frozen_stages": 1, "precision": "pure-bf16"},
    {"optimizer": "adamw-8bit", "loss": "soft-target", "memory_format": "channels_last"},
    {"offload": "activations"},
    {"offload": "activations", "accumulate": 2},
    {"optimizer_in_backward": True},
    {"parallelism": "ddp"},
    {"zero_grad_to_none": False, "amsgrad": True},
)


def check(name: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        config, chosen = choose(name, {"batch_size": 4, **setting}, None, SMALL)
    except UnsupportedError:
        pytest.skip("the library does not have it")
    build = on_shapes(config, chosen)
    found = record_training(build, config, chosen)
    monkeypatch.setattr(Training, "repeats", False)
    assert found == record_training(build, config, chosen)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_it_is_the_step_that_would_be_recorded(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(NAMES[0], setting, monkeypatch)


@pytest.mark.combinations
@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_it_is_in_every_library(
    name: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, setting, monkeypatch)


def test_what_outlives_the_first_step_is_not_repeated() -> None:
    kept = [Allocated(1, 8, "mask")]
    assert repeated(kept, 1, 1) is None
    assert repeated([*kept, Freed(1)], 1, 1) == [Allocated(2, 8, "mask"), Freed(2)]


def test_a_second_step_is_recorded_where_it_cannot_be_read_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, chosen = choose(NAMES[0], {"batch_size": 4}, None, SMALL)
    build = on_shapes(config, chosen)
    found = record_training(build, config, chosen)
    monkeypatch.setattr(training, "repeated", lambda *_: None)
    assert found == record_training(build, config, chosen)
