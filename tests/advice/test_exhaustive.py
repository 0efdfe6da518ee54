"""Few choices are estimated at their own batch: the answer is that of estimating all of them. And
`planner advise` of several GPUs."""

import re
from typing import Any

import pytest

from planner import TrainSetting
from planner.advice.advice import advise
from planner.advice.space import combine_levers
from planner.advice.table import FRONT_END, FRONT_STEP, Table
from planner.advice.wish import EXPANDABLE, Choice
from planner.cli import main
from planner.estimation.estimate import Estimate, estimate
from tests.advice.test_advise import wish_for
from tests.steps import TINY

MODEL = "timm:swin_base_patch4_window12_384"
WISHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "only offloaded": (TINY, {"gpu": "rtx 3090", "memory_bytes": "520MiB", "batch_size": 64,
                              "keep": ["compile", "checkpointing", "accumulate"]}),
    "nothing compiled": (TINY, {"gpu": "v100-sxm-16gb", "memory_bytes": "650MiB",
                                "batch_size": 64, "keep": ["compile"]}),
    "a Swin-B": (MODEL, {"gpu": "rtx 4090", "batch_size": 256}),
}  # fmt: skip


def every_estimate(
    model: Any, wish: dict[str, Any], resorts: bool
) -> list[tuple[Choice, Estimate]]:
    """All that the search may choose from, each by `planner.estimate`, but for what fits only by
    the allocator's retries, which is not advised."""
    read = wish_for(model, **wish)
    choices = combine_levers(read, Table(read), resorts).choices
    found = [
        (choice, estimate(
            model, choice.setting, gpu=wish["gpu"], memory_bytes=wish.get("memory_bytes"),
            allocator=EXPANDABLE if choice.expandable else None,
        ))
        for choice in choices
    ]  # fmt: skip
    return [(choice, each) for choice, each in found if not each.num_alloc_retries]


def fitting_of(
    model: Any, wish: dict[str, Any], resorts: bool
) -> list[tuple[Choice, Estimate, float]]:
    """Those that fit, with their images per second."""
    every = every_estimate(model, wish, resorts)
    return [(c, e, e.throughput.images_per_second) for c, e in every if e.fits and e.throughput]


def check(model: Any, wish: dict[str, Any]) -> None:
    found = advise(model, **wish)
    fitting = fitting_of(model, wish, resorts=True)
    assert fitting
    assert found.recommended is not None
    fastest = max(rate for _, _, rate in fitting)
    by_figures = found.fastest or found.recommended
    assert by_figures.images_per_second > 0.999_999 * fastest
    best = best_of(model, wish, fitting)
    assert found.recommended.estimate.fits_surely >= bool(best[1].fits_surely)
    assert found.recommended.images_per_second > 0.999_999 * best[2]
    sure = [rate for _, e, rate in fitting if e.fits_surely]
    if found.fastest_sure is not None:
        assert found.fastest_sure.images_per_second == pytest.approx(max(sure))
    else:
        assert bool(found.recommended.estimate.fits_surely) == bool(sure)
    # What is held back is no better than the best, and no part of the front.
    if any("ways with offload" in line for line in found.left_out):
        fitting = fitting_of(model, wish, resorts=False)
    assert front_of(fitting, found.budget_bytes) == [
        (way.estimate.device_total_bytes, pytest.approx(way.images_per_second))
        for way in found.front
    ]


def best_of(
    model: Any, wish: dict[str, Any], fitting: list[tuple[Choice, Estimate, float]]
) -> tuple[Choice, Estimate, float]:
    """By its definition: of those not known to be slower than the fastest, one that fits surely,
    then one as near to the wish, then the fastest."""
    table = Table(wish_for(model, **wish))
    fastest = max(fitting, key=lambda row: row[2])[0]
    alike = [row for row in fitting if not table.is_slower(row[0], fastest)]
    far = table.wish.distance
    return min(alike, key=lambda row: (not row[1].fits_surely, far(row[0]), -row[2]))


def front_of(fitting: list[tuple[Choice, Estimate, float]], budget: int) -> list[tuple[int, float]]:
    """By its definition: from the fastest on, whatever needs less than the last by a step."""
    fastest = max(rate for _, _, rate in fitting)
    front: list[tuple[int, float]] = []
    plain = TrainSetting()
    by_rate = [(-round(row[2], 6), len(row[0].setting.differences(plain)), row) for row in fitting]
    for *_, (_, each, rate) in sorted(by_rate, key=lambda row: row[:2]):
        num_bytes = each.device_total_bytes
        is_next = not front or num_bytes < front[-1][0] - int(FRONT_STEP * budget)
        if is_next and rate >= FRONT_END * fastest:
            front.append((num_bytes, rate))
    return front


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.release if model == MODEL else ())
        for case, (model, _) in WISHES.items()
    ],
)
def test_the_answer_is_that_of_every_combination(case: str) -> None:
    check(*WISHES[case])


def test_nothing_is_interpolated_once_the_table_stops() -> None:
    table = Table(wish_for(TINY))
    choice = Choice(table.wish.asked).updated({"batch_size": 4, "accumulate": 2})
    interpolated = table.rate(choice)
    table.stop_interpolating()
    assert table.rate(choice) != interpolated


def test_the_command_names_the_link_where_several_gpus_have_one() -> None:
    found = advise(TINY, gpu="gh200", world_size=2, parallelism="fsdp", link="nvlink-h100")
    assert "--link nvlink-h100" in (found.recommended or found.as_asked).command
    one = advise(TINY, gpu="a100-sxm-80gb", batch_size=16, link="pcie4")
    assert "--link" not in (one.recommended or one.as_asked).command, "estimate refuses it there"


def test_the_command_takes_gpus_and_says_what_each_reaches(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("advise", tiny, "--gpu", "a100-sxm-80gb", "--gpus", "2", "--parallelism", "fsdp")
    assert main([*arguments, "--batch-size", "16"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r"on each of 2 GPUs, .*; ([\d,]+) images/s on 2 GPUs \(([\d,]+) each\)", said)
    assert found is not None, said
    of_all, each = (int(rate.replace(",", "")) for rate in found.groups())
    assert abs(of_all - 2 * each) <= 1
