"""FSDP2 on shapes laid beside torch's own under the fake process group: event by event the same.

Shown with torch 2.14.1. Equal is what `tests/equality.py` says, and the stream of each allocation,
and what is sent and awaited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.estimation.ledgers import is_on_shapes
from planner.ledger.affine import Recorder, in_canonical_order
from planner.ledger.ledger import Allocated, Event, Ledger, Marked
from planner.libraries.registry import find_library
from planner.step.training import record_training
from tests.equality import collectives, first_difference
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


def streams_of(events: Sequence[Event]) -> list[str]:
    """Of what is allocated in the steps."""
    steps = events[events.index(Marked("build", 0)) :]
    return [e.stream for e in steps if isinstance(e, Allocated) and e.num_bytes]


def assert_as_torch_does(config: SwinConfig, changes: Changes, rank: int = 0) -> None:
    from tests.fake_sharding import trace_sharded

    require(config.library)
    setting = resolved(config, changes)
    assert is_on_shapes(config, setting)
    on_shapes = recorded(config, setting, rank % setting.shard_size).events
    traced = trace_sharded(config, setting, rank)
    difference = first_difference(on_shapes, traced)
    assert not difference, difference
    assert streams_of(on_shapes) == streams_of(traced)
    assert collectives(on_shapes) == collectives(traced)


@pytest.mark.parametrize(
    ("changes", "rank"),
    [
        ({"world_size": 64, "checkpointing": "blocks", "accumulate": 2}, 63),
        ({**HSDP, **BF16, "clip_grad": True}, 7),
    ],
    ids=name_of,
)
def test_worlds_and_ranks(changes: Changes, rank: int) -> None:
    assert_as_torch_does(small(**ONE_BLOCK), changes, rank)


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


def test_what_shapes_do_not_follow_is_traced() -> None:
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
    from tests.fake_sharding import trace_sharded

    config = small(**ONE_BLOCK)
    ((field, value),) = changes.items()
    with pytest.raises(UnsupportedError, match=f"(?s)FSDP2.*{field} is {value}"):
        resolved(config, changes)
    setting = resolved(config, {}).model_copy(update=changes)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"contiguous|strategy|placement"):
        trace_sharded(config, setting)
