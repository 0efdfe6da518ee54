"""The search skips what a bound rules out: the answer is that of estimating every combination."""

from __future__ import annotations

from typing import Any

import pytest

from planner import SwinConfig, TrainSetting, advise, estimate
from planner.advice.estimates import Estimates
from planner.advice.search import FRONT_END, FRONT_STEP, offer
from planner.advice.wish import Choice, read_wish
from planner.estimation import Estimate
from planner.memory.allocator_config import parse_allocator_config

TINY = SwinConfig(
    image_size=(56, 56), depths=(2, 2), num_heads=(1, 2), embed_dim=32, num_classes=10
)
MODEL = "timm:swin_base_patch4_window12_384"
WISHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "does not fit": (TINY, {"gpu": "rtx 3090", "memory_bytes": "700MiB", "batch_size": 512}),
    "fits": (TINY, {"gpu": "rtx 3090", "batch_size": 16}),
    "a global batch": (TINY, {"gpu": "a100-sxm-80gb", "memory_bytes": "1GiB",
                              "global_batch": 96}),
    "nothing compiled": (TINY, {"gpu": "v100-sxm-16gb", "memory_bytes": "650MiB",
                                "batch_size": 64, "keep": ["compile"]}),
}  # fmt: skip


def every_estimate(model: Any, wish: dict[str, Any]) -> list[tuple[Choice, Estimate]]:
    """All that the search may choose from, each by `planner.estimate`."""
    read = read_wish(
        model, None, gpu=wish["gpu"], memory_bytes=wish.get("memory_bytes"),
        batch_size=wish.get("batch_size"), global_batch=wish.get("global_batch"),
        keep=wish.get("keep", ()), allow=wish.get("allow", ()), allocator=None, overrides={},
    )  # fmt: skip
    choices = offer(read, Estimates(read)).choices
    expandable = parse_allocator_config("expandable_segments:True")
    return [
        (choice, estimate(
            model, choice.setting, gpu=wish["gpu"], memory_bytes=wish.get("memory_bytes"),
            allocator=expandable if choice.expandable else None,
        ))
        for choice in choices
    ]  # fmt: skip


def check(model: Any, wish: dict[str, Any]) -> None:
    found = advise(model, **wish)
    fitting = [(c, e, e.throughput.images_per_second) for c, e in every_estimate(model, wish)
               if e.fits and e.throughput]  # fmt: skip
    assert fitting
    assert found.recommended is not None
    fastest = max(rate for _, _, rate in fitting)
    assert found.recommended.images_per_second == pytest.approx(fastest)
    sure = [rate for _, e, rate in fitting if e.fits_surely]
    surely = found.surely or found.recommended
    assert bool(sure) == bool(surely.estimate.fits_surely)
    if sure:
        assert surely.images_per_second == pytest.approx(max(sure))
    assert front_of(fitting, found.budget_bytes) == [
        (way.estimate.device_total_bytes, pytest.approx(way.images_per_second))
        for way in found.front
    ]


def front_of(fitting: list[tuple[Choice, Estimate, float]], budget: int) -> list[tuple[int, float]]:
    """By its definition: from the fastest on, whatever needs less than the last by a step."""
    fastest = max(rate for _, _, rate in fitting)
    front: list[tuple[int, float]] = []
    for _, each, rate in sorted(fitting, key=lambda row: (-round(row[2], 6), changes(row[0]))):
        num_bytes = each.device_total_bytes
        is_next = not front or num_bytes < front[-1][0] - int(FRONT_STEP * budget)
        if is_next and rate >= FRONT_END * fastest:
            front.append((num_bytes, rate))
    return front


def changes(choice: Choice) -> int:
    return len(choice.setting.differences(TrainSetting()))


@pytest.mark.parametrize("case", ["nothing compiled"])
def test_the_answer_is_that_of_every_combination(case: str) -> None:
    check(*WISHES[case])


@pytest.mark.combinations
@pytest.mark.parametrize("case", [case for case in WISHES if case != "nothing compiled"])
def test_the_answer_is_that_of_every_combination_of_other_wishes(case: str) -> None:
    check(*WISHES[case])


@pytest.mark.combinations
def test_the_answer_for_a_swin_b_is_that_of_every_combination() -> None:
    check(MODEL, {"gpu": "rtx 4090", "batch_size": 256})
