"""Rates are measured by the same code on every device; here a CPU, with tiny sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from planner.environment.rates import (
    Workload,
    load_rates,
    measure_rates,
    rates_path,
    save_rates,
)
from planner.hardware import find_gpu
from planner.schema import TrainSetting
from planner.step.ledger import Computed
from planner.throughput import DeviceRates, predict_step, rates_for

TINY = Workload(
    rows=64, channels=32, copy_bytes=2**16, images=1, side=14, host_layers=2, sample_seconds=1e-4
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def measured() -> DeviceRates:
    return measure_rates("cpu", TINY)


def test_every_rate_is_measured(measured: DeviceRates) -> None:
    assert set(measured.matmul_flops) == {"float32", "bfloat16"}
    rates = [*measured.matmul_flops.values(), measured.bandwidth, *measured.host_seconds.values()]
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)
    assert set(measured.host_seconds) == {"forward", "backward", "optimizer", "zero_grad"}
    assert all(0 < share <= 1 for share in measured.kind_share.values())
    assert not measured.asynchronous
    assert measured.basis.startswith("measured on ")
    assert "torch" in measured.basis


def test_measured_rates_predict_a_step(measured: DeviceRates) -> None:
    work = Computed("aten.mm", "matmul", "float32", 10**9, 10**6, 1, "")
    took = predict_step([("forward", work)], measured, TrainSetting(precision="fp32"))
    least = 10**9 / measured.matmul_flops["float32"]
    assert took.step_seconds >= least
    assert took.basis == measured.basis


def test_the_precision_of_fp32_matmuls_is_left_as_it_was() -> None:
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        measure_rates("cpu", TINY)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("rates", [rates_for(find_gpu("h200")), None])
def test_rates_are_kept_and_read_back(rates: DeviceRates | None, measured: DeviceRates) -> None:
    kept = rates or measured
    assert load_rates(kept.name) is None
    path = save_rates(kept)
    assert path == rates_path(kept.name)
    assert load_rates(kept.name) == kept
    assert load_rates("another device") is None
    assert load_rates(kept.name, torch_version="1.13") is None, "another torch, other rates"
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 99, "rates": {}}'])
def test_a_damaged_file_counts_as_not_measured(text: str, measured: DeviceRates) -> None:
    save_rates(measured).write_text(text)
    assert load_rates(measured.name) is None


def test_a_file_with_a_missing_rate_counts_as_not_measured(measured: DeviceRates) -> None:
    path = save_rates(measured)
    data = json.loads(path.read_text())
    del data["rates"]["bandwidth"]
    path.write_text(json.dumps(data))
    assert load_rates(measured.name) is None
