"""Parts of a step on shapes, each by itself: repeats, frames, attention's backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from planner.core.schema import SwinConfig, TrainSetting
from planner.estimation.estimate import choose
from planner.ledger.ledger import Ledger
from planner.step.matmul import backward_scratch
from planner.step.tensor import _callers_keep_arguments
from planner.step.training import Training, record_training
from tests.building import on_shapes

# The second step that is read off the first is the one that a second step records.

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


# A ledger is the same whatever evaluates Python's frames around it.

TINY = SwinConfig(
    library="timm", image_size=(56, 56), depths=(2, 2), num_heads=(1, 2), embed_dim=32
)


def recorded() -> Ledger:
    setting = TrainSetting(batch_size=3, attention="eager")
    return record_training(on_shapes(TINY, setting), TINY, setting)


@pytest.fixture
def dynamo() -> Iterator[None]:
    """torch.compile's evaluator, as a thread that ended within a compiled call leaves it behind."""
    import torch._dynamo.eval_frame as dynamo

    before = dynamo.set_eval_frame(False)
    yield
    dynamo.set_eval_frame(before)


def test_compiling_elsewhere_changes_no_ledger(request: pytest.FixtureRequest) -> None:
    alone = recorded()
    request.getfixturevalue("dynamo")
    assert _callers_keep_arguments()
    assert recorded() == alone


# What the backward of memory-efficient attention takes besides its results.


def test_the_workspace_is_a_block_for_each_64_queries_of_a_head() -> None:
    """Derived: Swin-T's first stage at batch 64: 4,096 windows, 3 heads, 49 queries, one block of
    16 + 64 * 64 * 4 B each."""
    found = backward_scratch((4096, 3, 49, 32), is_half=True)
    assert found == (0, 0, 4096 * 3 * 49 * 4, 201_523_200)
    # Windows of 12: 144 queries are three blocks; heads wider than 64 channels are two.
    assert backward_scratch((10, 2, 144, 32), is_half=True).workspace == 10 * 2 * 3 * 16_400
    assert backward_scratch((10, 2, 49, 96), is_half=True).workspace == 10 * 2 * 2 * 16_400


def test_in_fp32_the_whole_product_comes_first() -> None:
    delta = 10 * 2 * 49 * 4
    assert backward_scratch((10, 2, 49, 32), is_half=False)[:3] == (32 * delta, delta, delta)
    assert backward_scratch((10, 1, 49, 32), is_half=False).sums == 0  # no copy to turn it round
