"""FSDP2 on shapes laid beside torch's own, one rank of it. What is sent and awaited is compared in
`tests/recording`."""

from __future__ import annotations

from typing import Any

import pytest

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.estimation.ledgers import is_on_shapes
from planner.ledger.affine import Recorder
from planner.ledger.ledger import Ledger
from planner.libraries.registry import find_library
from planner.step.training import record_training
from tests.equality import assert_as_torch, in_canonical_order
from tests.equality import recorded as recorded_by_torch
from tests.libraries.steps import Changes, name_of, needs, require

pytestmark = needs("torch", "timm")

# Three blocks, of rows that 8 devices do not share evenly.
SMALL: dict[str, Any] = {
    "image_size": 56, "depths": (2, 1), "num_heads": (3, 6), "embed_dim": 48, "num_classes": 10,
}  # fmt: skip
ONE_BLOCK = {"depths": (1,), "num_heads": (3,)}
FSDP: Changes = {"batch_size": 2, "precision": "fp32", "parallelism": "fsdp", "world_size": 8}
HSDP: Changes = {"parallelism": "hsdp", "fsdp_shard_size": 2}
BF16: Changes = {"precision": "bf16", "fsdp_param_dtype": "bf16"}


def small(library: str = "timm", version: int = 1, **changes: Any) -> SwinConfig:
    return SwinConfig.model_validate({"library": library, "version": version, **SMALL, **changes})


def resolved(config: SwinConfig, changes: Changes) -> ResolvedSetting:
    return find_library(config.library).resolve(config, TrainSetting(**{**FSDP, **changes}))


def recorded(config: SwinConfig, setting: ResolvedSetting, rank: int = 0) -> Ledger:
    build = find_library(config.library).on_shapes(config, setting)
    return record_training(build, config, setting, in_place_sums=False, rank=rank)


def assert_as_torch_does(config: SwinConfig, changes: Changes) -> None:
    """One rank of them, by torch's own FSDP2 over the emulated NCCL."""
    require(config.library)
    setting = resolved(config, changes)
    assert is_on_shapes(config, setting)
    assert_as_torch(config, setting, error=0.005)


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 64, "nodes": 8, "checkpointing": "blocks", "accumulate": 2},
        {**HSDP, **BF16, "clip_grad": True},
    ],
    ids=name_of,
)
def test_worlds(changes: Changes) -> None:
    assert_as_torch_does(small(**ONE_BLOCK), changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp16", "clip_grad": True, "zero_grad_to_none": False, "ema": True},
        {**BF16, "world_size": 1, "validation_batch_size": 3, "optimizer": "lion-forloop"},
    ],
    ids=name_of,
)
def test_optimizer_steps_on_shards(changes: Changes) -> None:
    assert_as_torch_does(small(**ONE_BLOCK), changes)


def test_any_batch_is_read_off_one_line() -> None:
    """A sum over fewer than 128 soft targets, as of 5 × 10 classes, loads one at a time."""
    config = small(num_classes=128)
    setting = resolved(config, {**BF16, "accumulate": 2})

    def record(batch_size: int) -> Ledger:
        return recorded(config, setting.model_copy(update={"batch_size": batch_size}))

    derived = Recorder(record).line().ledger(5)
    assert in_canonical_order(derived.events) == in_canonical_order(record(5).events)


def test_what_shapes_do_not_follow_is_recorded() -> None:
    config = small()
    assert is_on_shapes(config, resolved(config, {}))
    for changes in (
        {"fsdp_param_dtype": "bf16"}, {"precision": "bf16", "fsdp_param_dtype": "fp16"},
        {"checkpointing": "stages"}, {"offload": "activations"}, {"lora_rank": 4},
        {"frozen_stages": 1}, {"optimizer": "adamw-8bit"},
    ):  # fmt: skip
        assert not is_on_shapes(config, resolved(config, changes)), changes
    reentrant = small("microsoft")
    assert not is_on_shapes(reentrant, resolved(reentrant, {"checkpointing": "blocks"}))


@pytest.mark.parametrize(
    "changes", [{"memory_format": "channels_last"}, {"optimizer": "sgd-fused"}], ids=name_of
)
def test_what_torch_raises_on_is_refused(changes: Changes) -> None:
    config = small(**ONE_BLOCK)
    ((field, value),) = changes.items()
    with pytest.raises(UnsupportedError, match=f"(?s)FSDP2.*{field} is {value}"):
        resolved(config, changes)
    setting = resolved(config, {}).model_copy(update=changes)
    with pytest.raises(PlannerError, match=r"contiguous|strategy|placement|fused SGD"):
        recorded_by_torch(config, setting)
