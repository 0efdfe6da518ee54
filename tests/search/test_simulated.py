"""The search holds up on devices that do not exist.

Eight devices of one pair, by seed: a small version of tests/benchmarks/simulated_worlds.py.
"""

from __future__ import annotations

from statistics import median

import pytest

from tests.benchmarks.described_devices import describe
from tests.benchmarks.simulated_draws import (
    Device,
    Pair,
    draw_device,
    make_pair,
    narrow_pair,
)
from tests.benchmarks.simulated_worlds import DESCRIBED, MAX_PROBES, search_device

PAIR = "a100-swin-t"
NUM_DEVICES = 8


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A drawing of the default space takes seconds, and the estimates of its arms more."""
    few = {"checkpointing": ("none", "blocks"), "attention": ("sdpa",)}
    return narrow_pair(PAIR, restrict=few, batch_sizes=(1, 8, 24, 64, 192, 512))


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
