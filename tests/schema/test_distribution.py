"""The fields of a setting that speak of several devices, and what of them does not go together."""

from __future__ import annotations

import pytest

from planner.core.errors import UsageError
from planner.core.schema import TrainSetting, parse


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"parallelism": "ddp"}, 1),
        ({"parallelism": "zero2"}, 1),
        ({"parallelism": "fsdp"}, 16),
        ({"parallelism": "zero3"}, 16),
        ({"parallelism": "hsdp", "nodes": 2}, 8),
        ({"parallelism": "hsdp", "fsdp_shard_size": 4}, 4),
    ],
)
def test_over_how_many_devices_weights_are_sharded(fields: dict[str, object], size: int) -> None:
    setting = TrainSetting.model_validate({"world_size": 16, **fields})
    assert setting.shard_size == size


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"world_size": 8, "nodes": 3}, "cannot be split over 3 nodes: choose a multiple of 3"),
        ({"ddp_bucket_view": True}, "belongs to parallelism ddp, and parallelism is none"),
        (
            {"parallelism": "fsdp", "world_size": 2, "ddp_compression": "fp16"},
            "ddp_compression is fp16, which belongs to parallelism ddp",
        ),
        ({"parallelism": "ddp", "fsdp_reshard": False}, "belongs to parallelism fsdp or hsdp"),
        ({"parallelism": "fsdp", "zero_overlap": True}, "parallelism zero1 or zero2 or zero3"),
        ({"parallelism": "hsdp", "world_size": 8}, "8 of 8 devices is no such share"),
        ({"parallelism": "hsdp", "nodes": 2}, "a world_size of 1 cannot be split over 2 nodes"),
        ({"parallelism": "hsdp", "world_size": 8, "fsdp_shard_size": 3}, "3 of 8 devices"),
        ({"parallelism": "ddp", "optimizer_in_backward": True}, "adds up gradients over devices"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(TrainSetting, fields, "the setting")
