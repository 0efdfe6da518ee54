"""The simulation of devices has the planner's arithmetic, and the search holds up in it.

Eight devices of one pair, by seed: a small version of tests/benchmarks/simulated_devices.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
import pytest

from planner.estimation import choose
from planner.hardware import recognise_gpu
from planner.ledgers import step_ledger
from planner.throughput.prediction import predict_step, rates_for
from tests.benchmarks import simulated_report as report
from tests.benchmarks.simulated_devices import EAGER, choose_devices, search_device
from tests.benchmarks.simulated_draws import (
    PAIRS,
    Device,
    Pair,
    SimulatedProber,
    draw_device,
    make_pair,
    narrow_pair,
    restricted,
)
from tests.benchmarks.simulated_physics import RECORDED, planners_physics, record_step, step_seconds

PAIR = "a100-swin-t"
NUM_DEVICES = 8  # the default run draws two, over a smaller space


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A drawing of the default space takes a second, and the estimates of its arms several."""
    few = {"checkpointing": ("none", "blocks"), "attention": ("sdpa",)}
    return narrow_pair(PAIR, restrict=few, batch_sizes=(1, 8, 24, 64, 192, 512))


@pytest.fixture(scope="module")
def devices(pair: Pair) -> list[Device]:
    return [draw_device(pair, 2000 + seed) for seed in range(2)]


@pytest.fixture(scope="module")
def more_devices() -> list[Device]:
    """Over the default space."""
    return [draw_device(make_pair(PAIR), 2000 + seed) for seed in range(NUM_DEVICES)]


def test_with_the_planners_rates_it_gives_the_planners_seconds(pair: Pair) -> None:
    check_seconds(pair, 6)


@pytest.mark.simulated
def test_it_gives_them_over_the_default_space_and_in_fp16() -> None:
    check_seconds(make_pair("t4-swin-t"), 12)


def check_seconds(found: Pair, num: int) -> None:
    gpu = recognise_gpu(found.device.name, found.device.total_bytes)
    assert gpu is not None
    rates = rates_for(gpu)
    # A step of one image is unlike all others (its strides are), and lies on no line.
    several = [c for c in found.space.candidates if c.setting.batch_size > 1]
    for c in Random(0).sample(several, num):
        eager = c.setting.model_copy(update={"compile": "off"})
        config, setting = choose(found.model, eager, None, {})
        wanted = predict_step(list(step_ledger(config, setting).operations()), rates, c.setting)
        at = record_step(found.model, setting.model_copy(update={"batch_size": RECORDED[0]}))
        batch = np.array([float(c.setting.batch_size)])
        got = step_seconds(at.at(batch), planners_physics(rates), c.setting)
        assert got[0] == pytest.approx(wanted.step_seconds, rel=1e-6), c.setting


def test_a_seed_draws_one_device(pair: Pair, devices: list[Device]) -> None:
    again = draw_device(pair, devices[0].seed)
    assert (again.seconds == devices[0].seconds).all()
    assert list(again.refused) == list(devices[0].refused)
    assert not np.allclose(devices[0].seconds, devices[1].seconds, rtol=0.02)


def test_a_device_with_fewer_modes_is_the_same_device(devices: list[Device]) -> None:
    eager = restricted(devices[0], EAGER)
    at = [devices[0].pair.space.index(c.setting) for c in eager.pair.space.candidates]
    assert (eager.seconds == devices[0].seconds[at]).all()
    assert {c.setting.compile for c in eager.pair.space.candidates} == {"off"}


def test_a_probe_is_of_the_truth(devices: list[Device]) -> None:
    device = devices[0]
    index = int(device.rates().argmax())
    candidate = device.pair.space.candidates[index]
    prober = SimulatedProber(device)
    records = [prober.probe(candidate) for _ in range(20)]
    seconds = median(s for r in records for s in r.step_seconds)
    assert seconds == pytest.approx(device.seconds[index], rel=0.03)
    assert all(r.device_bytes == device.num_bytes[index] for r in records)


def test_devices_are_spread_over_the_pairs() -> None:
    found = choose_devices(20, tuple(PAIRS))
    assert len(set(found)) == 20
    assert {name for name, _ in found} == set(PAIRS)


@pytest.mark.simulated
def test_within_ten_minutes_it_finds_something_fast_on_every_device(
    more_devices: list[Device],
) -> None:
    runs = [search_device(d, "budget", budget_seconds=600.0) for d in more_devices]
    assert not any(r.nothing for r in runs)
    assert median(r.recommended for r in runs) <= 0.04
    assert max(r.recommended for r in runs) <= 0.25  # a mode that was not reached in time


@pytest.mark.simulated
def test_without_a_compiler_it_ends_by_itself_with_the_best_eager_setting(
    more_devices: list[Device],
) -> None:
    for device in more_devices[:3]:
        refused = [
            "unsupported: no compiler" if c.setting.compile != "off" else why
            for c, why in zip(device.pair.space.candidates, device.refused, strict=True)
        ]
        run = search_device(replace(device, refused=refused), "budget", budget_seconds=600.0)
        assert not run.nothing
        assert run.ended_by_itself, run.stopped_because
        assert run.recommended <= 0.03
        assert run.failed_probes <= 8


@pytest.mark.simulated
def test_eager_settings_are_searched_in_a_dozen_probes(more_devices: list[Device]) -> None:
    runs = [search_device(restricted(d, EAGER), "eager") for d in more_devices]
    assert all(r.ended_by_itself for r in runs)
    assert median(r.probes for r in runs) <= 12
    assert max(r.recommended for r in runs) <= 0.05


def test_the_report_is_kept_and_shown(tmp_path: Path, devices: list[Device]) -> None:
    runs = [search_device(d, "eager", strategy) for d in _eager(devices[:2])
            for strategy in ("planner", "random")]  # fmt: skip
    for run in runs:
        report.append(tmp_path, run, first=run is runs[0])
    report.finish(tmp_path, runs, {"devices": 2})
    assert {p.name for p in tmp_path.iterdir()} == {
        "runs.csv", "summary.csv", "configuration.json"
    }  # fmt: skip
    shown = report.show(tmp_path).splitlines()
    assert [line.split("|")[2].strip() for line in shown[2:]] == ["planner", "random"]


def _eager(devices: list[Device]) -> Iterator[Device]:
    return (restricted(d, EAGER) for d in devices)
