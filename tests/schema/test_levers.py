"""The levers of a setting: what each may say, and which exclude each other."""

from __future__ import annotations

from typing import Any

import pytest

from planner.core.errors import UsageError
from planner.core.schema import TrainSetting, parse


@pytest.mark.parametrize("value", ["blocks:0", "blocks:every-1", "selective:2", "blocks:a"])
def test_other_parts_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match="blocks:every-2, selective"):
        parse(TrainSetting, {"checkpointing": value}, "the setting")


@pytest.mark.parametrize(
    "fields",
    [
        {"accumulate": 2},
        {"clip_grad": True},
        {"precision": "fp16"},
        {"zero_grad_to_none": False},
        {"world_size": 2},
        {"parallelism": "ddp"},
    ],
)
def test_optimizer_in_backward_excludes_what_needs_all_gradients(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="frees each gradient as soon as it is there"):
        parse(TrainSetting, {"optimizer_in_backward": True, **fields}, "the setting")


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "adamw-8bit"},
        {"optimizer_in_backward": True},
        {"clip_grad": True},
        {"precision": "fp16"},
        {"zero_grad_to_none": False},
        {"world_size": 2},
        {"parallelism": "ddp"},
    ],
)
def test_an_optimizer_on_the_host_excludes_what_torchaos_does_not_do(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(UsageError, match="copies each gradient to the host in backward"):
        parse(TrainSetting, {"offload_optimizer": "state", **fields}, "the setting")


def test_gradients_that_are_gone_are_not_added_up() -> None:
    TrainSetting(offload_optimizer="state", accumulate=2)
    with pytest.raises(UsageError, match="adds up gradients that are gone"):
        parse(
            TrainSetting,
            {"offload_optimizer": "state-and-gradients", "accumulate": 2},
            "the setting",
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"compile_scope": "blocks"},
        {"compile_dynamic": True},
        {"compile_fullgraph": True},
        {"activation_memory_budget": 0.5},
    ],
)
def test_what_belongs_to_a_compiled_step_needs_one(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="compile is off"):
        parse(TrainSetting, fields, "the setting")
    TrainSetting(compile="default", **fields)


def test_every_fault_is_told_at_once() -> None:
    given = {
        "optimizer_in_backward": True, "accumulate": 4, "clip_grad": True, "lora_targets": "all",
    }  # fmt: skip
    with pytest.raises(UsageError) as found:
        parse(TrainSetting, given, "the setting")
    assert all(word in found.value.message for word in ("accumulate 4", "clip_grad", "lora_rank 0"))
