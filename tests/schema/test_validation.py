"""Every fault of a configuration in one message, in the user's field names, one line each."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from planner.core.errors import UsageError
from planner.core.schema import FactoryModel, SwinConfig, TrainSetting, parse


def faults_of(schema: type[BaseModel], **data: Any) -> list[str]:
    with pytest.raises(UsageError) as caught:
        parse(schema, data, "swin.yaml")
    headline, *lines = str(caught.value).splitlines()
    counted = "one fault" if len(lines) == 1 else f"{len(lines)} faults"
    assert headline == f"swin.yaml has {counted}:"
    return [line.strip() for line in lines]


def test_faults_of_fields_and_between_fields_come_together() -> None:
    assert faults_of(SwinConfig, drop_rate=2, depths=(2, 2), num_heads=(3, 6, 12), windw=7) == [
        "drop_rate: Input should be less than 1 (got 2)",
        "windw: no such field. Did you mean 'window_size'?",
        "num_heads has 3 entries and depths has 2: give one for each stage",
    ]


def test_a_fault_between_fields_is_not_heard_of_a_field_at_fault() -> None:
    """num_heads is fine beside the depths that were meant, whatever they were."""
    (fault,) = faults_of(SwinConfig, depths="2,2,two", num_heads=(3, 6, 12))
    assert fault.startswith("depths.2: Input should be a valid integer")


def test_every_fault_between_fields_has_its_line() -> None:
    assert faults_of(SwinConfig, num_heads=(3, 6, 12, 25), image_size=2, window_size=(7, 7)) == [
        "window_size has 2 entries and depths has 4: give one for each stage",
        "num_heads[3] = 25 does not divide the stage's 768 channels (embed_dim × 2^3)",
        "image_size 2x2 is smaller than one patch (patch_size 4)",
    ]


@pytest.mark.parametrize(
    ("window", "fault"),
    [
        (0, "window_size: Input should be greater than or equal to 1 (got 0)"),
        ((7, 0, 7, 7), "window_size.1: Input should be greater than or equal to 1 (got 0)"),
        (
            "seven",
            "window_size: Input should be a valid integer, unable to parse string as an integer "
            "(got 'seven')",
        ),
    ],
)
def test_a_choice_of_types_complains_once(window: object, fault: str) -> None:
    assert faults_of(SwinConfig, window_size=window) == [fault]


def test_a_setting_is_held_to_the_same() -> None:
    assert faults_of(TrainSetting, lora_targets="all", batch_size=0) == [
        "batch_size: Input should be greater than or equal to 1 (got 0)",
        "lora_targets is all, and lora_rank 0 adds no adapters",
    ]


def test_a_side_stands_for_a_square_in_every_model() -> None:
    assert parse(FactoryModel, {"factory": "a:b", "image_size": 96}, "").image_size == (96, 96)
    assert parse(SwinConfig, {"image_size": "96x128"}, "").image_size == (96, 128)
