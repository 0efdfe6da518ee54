"""The levers of a setting and the fields that speak of several devices: what each may say, and what
does not go together."""

from __future__ import annotations

from typing import Any

import pytest

from planner.core.errors import UsageError
from planner.core.schema import TrainSetting, parse


@pytest.mark.parametrize("value", ["blocks:0", "blocks:every-1", "selective:2", "blocks:a"])
def test_other_parts_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match="blocks:every-2, selective"):
        parse(TrainSetting, {"checkpointing": value}, "the setting")


EXCLUDED: list[tuple[dict[str, Any], str, list[dict[str, Any]]]] = [
    (
        {"optimizer_in_backward": True}, "frees each gradient as soon as it is there",
        [{"accumulate": 2}, {"clip_grad": True}, {"precision": "fp16"},
         {"zero_grad_to_none": False}, {"world_size": 2}, {"parallelism": "ddp"}],
    ),
    (
        {"offload_optimizer": "state"}, "copies each gradient to the host in backward",
        [{"optimizer": "adamw-8bit"}, {"optimizer_in_backward": True}, {"clip_grad": True},
         {"precision": "fp16"}, {"zero_grad_to_none": False}, {"world_size": 2},
         {"parallelism": "ddp"}],
    ),
    (
        {"offload_optimizer": "state-and-gradients"}, "adds up gradients that are gone",
        [{"accumulate": 2}],
    ),
    (
        {}, "compile is off",
        [{"compile_scope": "blocks"}, {"compile_fullgraph": True},
         {"activation_memory_budget": 0.5}],
    ),
    ({"world_size": 8}, "cannot be split over 3 nodes: choose a multiple of 3", [{"nodes": 3}]),
    ({}, "belongs to parallelism ddp, and parallelism is none", [{"ddp_bucket_view": True}]),
    (
        {"parallelism": "fsdp", "world_size": 2}, "belongs to parallelism",
        [{"ddp_compression": "fp16"}],
    ),
    (
        {"parallelism": "hsdp", "world_size": 8}, "of 8 devices",
        [{}, {"fsdp_shard_size": 3}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "said", "excluded"), EXCLUDED, ids=str)
def test_what_does_not_go_together_is_refused(
    fields: dict[str, Any], said: str, excluded: list[dict[str, Any]]
) -> None:
    for other in excluded:
        with pytest.raises(UsageError, match=said):
            parse(TrainSetting, {**fields, **other}, "the setting")


def test_over_how_many_devices_weights_are_sharded() -> None:
    for fields, size in (
        ({"parallelism": "ddp"}, 1), ({"parallelism": "zero2"}, 1), ({"parallelism": "fsdp"}, 16),
        ({"parallelism": "zero3"}, 16), ({"parallelism": "hsdp", "nodes": 2}, 8),
        ({"parallelism": "hsdp", "fsdp_shard_size": 4}, 4),
    ):  # fmt: skip
        assert TrainSetting.model_validate({"world_size": 16, **fields}).shard_size == size


def test_every_fault_is_told_at_once() -> None:
    given = {
        "optimizer_in_backward": True, "accumulate": 4, "clip_grad": True, "lora_targets": "all",
    }  # fmt: skip
    with pytest.raises(UsageError) as found:
        parse(TrainSetting, given, "the setting")
    assert all(word in found.value.message for word in ("accumulate 4", "clip_grad", "lora_rank 0"))
