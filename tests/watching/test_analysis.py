"""A training's figures against a plan's: which differences are told, and that no other is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.core.errors import PlannerError
from planner.core.files import to_json
from planner.core.units import GIB
from planner.watching.analysis import judge
from planner.watching.expectation import Expectation, read_expectation
from tests.trainers.cases import recommendation

PLAN = Expectation(
    source="run/recommendation.json",
    basis="measured",
    device="RTX",
    images_per_step=64,
    images_per_second=1000.0,
    peak_allocated_bytes=8 * GIB,
    peak_reserved_bytes=9 * GIB,
)
AS_PLANNED = {
    "steps": 10,
    "images": 640,
    "images_per_second": 990.0,
    "peak_allocated_bytes": 8 * GIB,
    "peak_reserved_bytes": 9 * GIB,
    "wait_share": 0.02,
    "alloc_retries": 2,
    "ooms": 0,
    "loss": 6.9,
}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, None),
        ({"peak_allocated_bytes": int(8.5 * GIB)}, "more allocated than planned"),
        ({"peak_reserved_bytes": 10 * GIB}, "more reserved than planned"),
        ({"images_per_second": 850.0}, "slower than planned"),
        ({"images_per_second": 10.0, "wait_share": 0.9, "warm_up": True}, None),
        ({"wait_share": 0.3}, "waiting for data"),
        ({"alloc_retries": 4}, "allocator retries"),
        ({"alloc_retries": 2}, None),  # they were told of before
        ({"scale": 32768.0}, "skipped steps"),
        ({"scale": 131072.0}, None),
        ({"ooms": 1}, "out of memory caught"),
        ({"loss": float("nan")}, "non-finite loss"),
        ({"clocks": {"slowed_by": ["hw_thermal_slowdown"], "temperature_c": 91}}, "throttled"),
        ({"images": 320}, "other batch"),
    ],
)
def test_each_difference_has_its_event(changed: dict[str, Any], name: str | None) -> None:
    before = {"alloc_retries": 2, "scale": 65536.0}
    found = judge({**AS_PLANNED, **changed}, before, PLAN, "RTX")
    assert [event.name for event in found] == [name] * (name is not None)
    assert all(event.message.endswith(".") for event in found)


def test_rates_of_another_device_are_not_compared() -> None:
    line = {**AS_PLANNED, "images_per_second": 10.0}
    (event,) = judge(line, {"alloc_retries": 2}, PLAN, "T4")
    assert event.name == "other device"


def test_plans_are_read_from_all_that_planner_writes(tmp_path: Path) -> None:
    assert read_expectation(None) is None
    found = recommendation()
    (tmp_path / "recommendation.json").write_text(found.model_dump_json())
    said = read_expectation(tmp_path)
    assert said is not None
    assert said.basis == "measured"
    assert said.images_per_second == found.evidence.images_per_second  # type: ignore[union-attr]
    estimate = planner.estimate("native:swin_tiny", batch_size=8, accumulate=2, gpu="rtx 3090")
    (tmp_path / "estimate.json").write_text(json.dumps([to_json(estimate)]))
    for plan in (estimate, tmp_path / "estimate.json", str(tmp_path / "estimate.json")):
        said = read_expectation(plan)
        assert said is not None
        assert said.basis == "estimated"
        assert said.images_per_step == 16
        assert said.peak_allocated_bytes == estimate.peak_allocated_bytes
    for broken in (7, tmp_path / "none", {"a": 1}):
        with pytest.raises(PlannerError):
            read_expectation(broken)
