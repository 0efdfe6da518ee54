"""The second step that is read off the first is the one that a second step records."""

from __future__ import annotations

from typing import Any

import pytest

from planner.estimation.estimate import choose
from planner.ledger.ledger import Allocated, Freed
from planner.step import training
from planner.step.training import Training, record_training, repeated
from tests.building import on_shapes

SMALL = {"image_size": (56, 56), "depths": (2, 2), "num_heads": (1, 2), "embed_dim": 32}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"accumulate": 3, "checkpointing": "selective", "precision": "pure-bf16", "clip_grad": True},
    {"optimizer": "adamw-fused", "checkpointing": "blocks:3", "ema": True},
    {"optimizer": "lion", "clip_grad": True},
    {"loss": "soft-target", "memory_format": "channels_last"},
    {"offload": "activations", "accumulate": 2},
    {"optimizer_in_backward": True},
    {"parallelism": "ddp"},
)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_it_is_the_step_that_would_be_recorded(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, chosen = choose("native:swin_tiny", {"batch_size": 4, **setting}, None, SMALL)
    build = on_shapes(config, chosen)
    found = record_training(build, config, chosen)
    monkeypatch.setattr(Training, "repeats", False)
    assert found == record_training(build, config, chosen)


def test_what_outlives_the_first_step_is_not_repeated() -> None:
    kept = [Allocated(1, 8, "mask")]
    assert repeated(kept, 1, 1) is None
    assert repeated([*kept, Freed(1)], 1, 1) == ([Allocated(2, 8, "mask"), Freed(2)], 2)


def test_a_second_step_is_recorded_where_it_cannot_be_read_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, chosen = choose("native:swin_tiny", {"batch_size": 4}, None, SMALL)
    build = on_shapes(config, chosen)
    found = record_training(build, config, chosen)
    monkeypatch.setattr(training, "repeated", lambda *_: None)
    assert found == record_training(build, config, chosen)
