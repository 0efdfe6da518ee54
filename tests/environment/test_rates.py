"""Rates are measured by the same code on every device; here a CPU, with tiny sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from planner.machine.hardware import find_gpu
from planner.throughput.bench import Bench, Workload, best_of_rounds, measure_rates
from planner.throughput.measured import (
    load_rates,
    rates_path,
    save_rates,
    why_impossible,
)
from planner.throughput.prediction import DeviceRates, rates_for

TINY = Workload(
    rows=64, channels=32, copy_bytes=2**16, images=1, side=14, host_layers=2, sample_seconds=1e-4
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def measured() -> DeviceRates:
    """The precision of fp32 matmuls is left as it was."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = measure_rates("cpu", TINY)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    return found


def test_every_rate_is_measured(measured: DeviceRates) -> None:
    assert set(measured.matmul_flops) == {"float32", "bfloat16"}
    rates = [*measured.matmul_flops.values(), measured.bandwidth, *measured.host_seconds.values()]
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)
    assert set(measured.host_seconds) == {"forward", "backward", "optimizer", "zero_grad"}
    assert all(0 < share <= 1 for share in measured.kind_share.values())
    assert not measured.asynchronous
    assert measured.basis.startswith("measured on ")
    assert "torch" in measured.basis


def test_what_disturbs_for_a_while_falsifies_no_dtype() -> None:
    """For the first round and a half all takes ten times as long: one after the other, the first
    dtype would be told as ten times slower than the last."""
    taken: list[str] = []

    def sampler(name: str, seconds: float) -> Callable[[], float]:
        def sample() -> float:
            taken.append(name)
            return seconds * (10 if len(taken) <= 4 else 1)

        return sample

    samples = {name: sampler(name, s) for name, s in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    assert best_of_rounds(samples, rounds=3) == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert taken == ["a", "b", "c"] * 3, "in turns"


def test_attention_is_timed_as_a_swin_trains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias that needs a gradient, which decides the kernel, and with its backward."""
    needed: list[bool] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def seen(*args: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
        needed.append(attn_mask.requires_grad)
        return attend(*args, attn_mask=attn_mask)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    trial = Bench(torch.device("cpu"), TINY)._attention("float32")
    gradients = trial.call()
    assert needed == [True]
    assert [g.shape[-2] for g in gradients] == [49] * 4  # type: ignore[attr-defined]
    assert trial.work == 3.5 * 4 * 4 * 3 * 49 * 49 * 32  # 4 windows of one image of 14 x 14


def test_rates_are_kept_and_read_back(measured: DeviceRates) -> None:
    assert load_rates(measured.name) is None
    path = save_rates(measured)
    assert path == rates_path(measured.name)
    assert load_rates(measured.name) == measured
    assert load_rates("another device") is None
    assert load_rates(measured.name, torch_version="1.13") is None, "another torch, other rates"
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("NVIDIA H200", {"bfloat16": 1.2 * 989e12}, None),
        ("NVIDIA H200", {"bfloat16": 1.3 * 989e12}, "bf16 1.29e+15/s, where H200"),
        ("NVIDIA H200", {"bandwidth": 1e13}, "bandwidth 1e+13/s, where H200"),
        ("Unheard-of GPU", {"bfloat16": 2e15}, None),  # as a B200 may
        ("Unheard-of GPU", {"bfloat16": 1.42e17}, "bf16 1.42e+17/s, where any card"),
        ("NVIDIA H200", {"float32": math.inf}, "fp32 inf/s"),
    ],
)
def test_rates_that_no_card_reaches_are_nonsense(
    name: str, change: dict[str, float], words: str | None
) -> None:
    plain = replace(rates_for(find_gpu("h200")), name=name)
    moved = {"bandwidth": change.pop("bandwidth")} if "bandwidth" in change else {}
    rates = replace(plain, matmul_flops={**plain.matmul_flops, **change}, **moved)
    said = why_impossible(rates)
    assert (said is None) == (words is None)
    assert words is None or words in (said or "")
    save_rates(rates)
    assert (load_rates(name) is None) == (words is not None), "what an older planner kept"


def test_a_damaged_file_counts_as_not_measured(measured: DeviceRates) -> None:
    path = save_rates(measured)
    lacking = json.loads(path.read_text())
    del lacking[1]["bandwidth"]
    for text in ("", "{", "[]", "[99, {}]", json.dumps(lacking)):
        path.write_text(text)
        assert load_rates(measured.name) is None
