"""The simulation of devices has the planner's arithmetic, and the search holds up in it.

Eight devices of one pair, by seed: a small version of tests/benchmarks/simulated_worlds.py.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import median

import numpy as np
import pytest

from planner.estimation.estimate import choose
from planner.estimation.ledgers import step_ledger
from planner.machine.hardware import recognise_gpu
from planner.throughput.prediction import predict_step
from planner.throughput.rates import rates_for
from tests.benchmarks.described_devices import describe
from tests.benchmarks.simulated_draws import (
    Device,
    Pair,
    draw_device,
    make_pair,
    narrow_pair,
)
from tests.benchmarks.simulated_physics import RECORDED, planners_physics, record_step, step_seconds
from tests.benchmarks.simulated_worlds import DESCRIBED, MAX_PROBES, search_device

PAIR = "a100-swin-t"
NUM_DEVICES = 8  # the default run draws two, over a smaller space


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A drawing of the default space takes a second, and the estimates of its arms several."""
    few = {"checkpointing": ("none", "blocks"), "attention": ("sdpa",)}
    return narrow_pair(PAIR, restrict=few, batch_sizes=(1, 8, 24, 64, 192, 512))


def test_with_the_planners_rates_it_gives_the_planners_seconds(pair: Pair) -> None:
    gpu = recognise_gpu(pair.device.name, pair.device.total_bytes)
    # Devices are drawn by kind of kernel.
    rates = replace(rates_for(gpu), compiled_bandwidth=None, batched_matmul_share=1.0)
    # A step of one image is unlike all others (its strides are), and lies on no line.
    several = [c for c in pair.space.candidates if c.setting.batch_size > 1]
    for c in Random(0).sample(several, 6):
        eager = c.setting.model_copy(update={"compile": "off"})
        config, setting = choose(pair.model, eager, None, {})
        wanted = predict_step(list(step_ledger(config, setting).operations()), rates, c.setting)
        at = record_step(pair.model, setting.model_copy(update={"batch_size": RECORDED[0]}))
        batch = np.array([float(c.setting.batch_size)])
        got = step_seconds(at.at(batch), planners_physics(rates), c.setting)
        assert got[0] == pytest.approx(wanted.step_seconds, rel=1e-6), c.setting


def drawn(pair: Pair) -> list[Device]:
    return [draw_device(pair, 2000 + seed) for seed in range(NUM_DEVICES)]


@pytest.mark.release
def test_within_ten_minutes_it_finds_something_fast_on_every_device() -> None:
    """Over the default space."""
    ended = [search_device(device, 600.0) for device in drawn(make_pair(PAIR))]
    assert not any(e.nothing for e in ended)
    assert median(e.regret for e in ended) <= 4
    assert max(e.regret for e in ended) <= 25  # a mode that was not reached in time


@pytest.mark.release
def test_eager_settings_are_searched_in_a_dozen_probes() -> None:
    pair = narrow_pair(PAIR, restrict={"compile": ("off",)})
    ended = [search_device(device) for device in drawn(pair)]
    assert max(e.probes for e in ended) < MAX_PROBES, "each ends by itself"
    assert median(e.probes for e in ended) <= 12
    assert max(e.regret for e in ended) <= 5


@pytest.mark.parametrize(
    "name",
    ["bf16 is slow", *(pytest.param(n, marks=pytest.mark.release)
                       for n in DESCRIBED if n != "bf16 is slow")],
)  # fmt: skip
def test_in_each_described_world_it_finds_something(pair: Pair, name: str) -> None:
    assert search_device(describe(pair, 1, **DESCRIBED[name]), 600.0).regret <= 30
