"""A whole training takes what its images take, and costs what its GPUs cost for so long."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from planner import advise, estimate
from planner.cli import main
from planner.core.files import to_json
from planner.report.time import cost_text
from planner.throughput.cost import IMAGENET_IMAGES, Cost, Training, cost_of
from planner.throughput.result import Throughput

# 8 GPUs of 1,000 images/s: 28.8 million images an hour. Within 20% either way that is up to 34.56
# and down to 23.04 million.
EIGHT = Throughput(0.064, 1000.0, "a card", 0.2, devices=8)
TRAINING = Training(epochs=288, images_per_epoch=1_000_000, price_per_hour=2.5)


def found(predicted: Throughput = EIGHT, training: Training = TRAINING) -> Cost:
    return cost_of(training, predicted)


def test_hours_and_price_are_those_of_all_devices_with_the_range_of_the_rate() -> None:
    one = found(replace(EIGHT, devices=1))
    assert (one.seconds, one.low_seconds, one.high_seconds) == pytest.approx(
        (288_000, 240_000, 360_000)
    )
    assert (one.price, one.low_price, one.high_price) == pytest.approx((200, 500 / 3, 250))
    assert cost_text(one) == "80 h (67–100), which costs 200 (167–250) at 2.5 an hour"


def test_of_several_devices_whose_exchange_is_not_known_only_the_least_is() -> None:
    cost = found()
    assert cost.seconds == pytest.approx(36_000)
    assert (cost.high_seconds, cost.high_price) == (None, None)
    assert cost_text(cost) == (
        "10 h (8.3 at least), which costs 200 (167 at least) at 8 × 2.5 an hour"
    )


def test_without_a_price_there_are_hours_and_without_a_rate_nothing() -> None:
    cost = found(replace(EIGHT, devices=1), Training(epochs=1))
    assert cost.images_per_epoch == IMAGENET_IMAGES
    assert cost.price is None
    assert "cost" not in cost_text(cost)
    assert cost_of(TRAINING, None) is None
    assert cost_of(None, EIGHT) is None


def test_estimates_ways_and_more_gpus_have_it_and_the_command_says_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "estimate native:swin_tiny --gpu a100-sxm-80gb --gpus 1,2 --epochs 9 --price-per-hour 2"
    assert main([*line.split(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    alone = estimate("native:swin_tiny", gpu="a100-sxm-80gb", epochs=9, price_per_hour=2)
    assert rows[0]["cost"] == to_json(alone.cost)
    assert rows[1]["cost"]["devices"] == 2
    ways = advise(
        "native:swin_tiny", gpu="a100-sxm-80gb", batch_size=64, epochs=9, price_per_hour=2,
        keep=("checkpointing", "offload", "attention", "activation_memory_budget"),
    )  # fmt: skip
    assert ways.plain.estimate.cost == alone.cost
    best = ways.recommended
    assert to_json(best)["cost"]["seconds"] < alone.cost.seconds
    assert ways.more_gpus[0].cost.devices == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--gpu a100-sxm-80gb --price-per-hour 2", "its length was not said"),
        ("--gpu a100-sxm-80gb --epochs 0", "above 0"),
        ("--memory 24GiB --epochs 3", "depends on the GPU"),
    ],
)
def test_a_training_that_is_not_whole_is_refused_with_a_way_out(
    options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["estimate", "native:swin_tiny", *options.split()]
    assert main(typed) == 2
    law, way_out = capsys.readouterr().err.strip().splitlines()
    assert said in law
    added = shlex.split(way_out.rstrip(".").partition(" --")[2])
    if "--epochs" in typed and added[0] == "epochs":
        typed = typed[: typed.index("--epochs")]
    assert main([*typed, f"--{added[0]}", added[1], "--json"]) == 0
