"""The largest batch that fits is the largest, although the allocator's bytes go up and down."""

from __future__ import annotations

import pytest

from planner import Estimate, SwinConfig, estimate, find_gpu, largest_batch
from planner.core.schema import TrainSetting
from planner.estimation.estimate import resolve
from planner.libraries.resolve import resolve_model

TINY = SwinConfig(
    image_size=(56, 56), depths=(2, 2), num_heads=(1, 2), embed_dim=32, num_classes=10
)


def least(found: Estimate) -> int:
    """The device's bytes if the allocator kept nothing beside what is live."""
    return found.device_total_bytes - found.breakdown["allocator_overhead"]


def fits_at_once(found: Estimate) -> bool:
    return bool(found.fits) and not found.num_alloc_retries


@pytest.mark.release
def test_a_larger_batch_that_fits_above_one_that_does_not_is_found() -> None:
    """Bisection over these batches ends below 39: 39 and 40 do not fit, and 41 does."""
    model = resolve_model("native:swinv2_large_384")
    assert isinstance(model, SwinConfig)
    gpu = find_gpu("rtx-3060-12gb")
    model_, setting = resolve(model, TrainSetting(precision="bf16", checkpointing="blocks"))
    assert isinstance(model_, SwinConfig)
    found = largest_batch(model_, setting, gpu)
    assert found is not None
    best = found.setting.batch_size
    assert found.fits
    assert any(
        not fits_at_once(estimate(model, setting, gpu=gpu, batch_size=b))
        for b in range(best - 5, best)
    )
    above = best + 1
    while least(found := estimate(model, setting, gpu=gpu, batch_size=above)) <= gpu.memory_bytes:
        assert not fits_at_once(found)
        above += 1


@pytest.mark.parametrize(
    "budget_mib",
    [700, *(pytest.param(mib, marks=pytest.mark.release) for mib in (1000, 2000))],
)
def test_none_above_the_largest_fits(budget_mib: int) -> None:
    model, setting = resolve(TINY, TrainSetting())
    assert isinstance(model, SwinConfig)
    budget = budget_mib << 20
    found = largest_batch(model, setting, memory_bytes=budget)
    assert found is not None
    batch = found.setting.batch_size
    while least(above := estimate(TINY, batch_size=(batch := batch + 1))) <= budget:
        assert above.device_total_bytes > budget


@pytest.mark.parametrize(
    ("precision", "at_once", "with_retries"),
    [("fp32", 225, 243), pytest.param("bf16", 355, 417, marks=pytest.mark.release)],
)
def test_the_largest_batch_with_retries_is_where_memory_runs_out(
    precision: str, at_once: int, with_retries: int
) -> None:
    """Under torch's own CUDA code on an emulated RTX 3090 (torch 2.13.0 and 2.15.0, 2026-11-23)
    fp32 ran at 243 and ended out of memory at 244, 245, 246 and 248; bf16 ran at 417 and ended out
    of memory at 418 and 419. At 243 it had 22.99 GiB reserved, as predicted."""
    card = find_gpu("rtx-3090")
    found = [
        largest_batch("native:swin_tiny", gpu=card, precision=precision, retries=retries)
        for retries in (False, True)
    ]
    assert [f and f.setting.batch_size for f in found] == [at_once, with_retries]
    most = found[1]
    assert most is not None
    assert most.num_alloc_retries > 0
    assert most.fits_surely is False
    assert most.headroom_bytes is not None
    assert most.headroom_bytes >= 0
    assert any("freeing cached memory" in text for text in most.assumed)


def test_what_was_not_looked_at_is_said() -> None:
    model, setting = resolve(TINY, TrainSetting(attention="eager"))
    assert isinstance(model, SwinConfig)
    many = largest_batch(model, setting, find_gpu("h200"))
    assert many is not None
    assert "was looked at" in many.assumed[-1]
    ended = largest_batch(model, setting, find_gpu("h200"), ceiling=100)
    assert ended is not None
    assert ended.setting.batch_size == 100
    assert "batches above 100 are not looked at" in ended.assumed[-1]
