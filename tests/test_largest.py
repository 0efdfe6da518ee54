"""The largest batch that fits is the largest, although the allocator's bytes go up and down."""

from __future__ import annotations

import pytest

from planner import Estimate, SwinConfig, estimate, find_gpu, largest_batch
from planner.estimation import resolve
from planner.libraries.resolve import resolve_model
from planner.schema import TrainSetting

TINY = SwinConfig(
    image_size=(56, 56), depths=(2, 2), num_heads=(1, 2), embed_dim=32, num_classes=10
)


def least(found: Estimate) -> int:
    """The device's bytes if the allocator kept nothing beside what is live."""
    return found.device_total_bytes - found.breakdown["allocator_overhead"]


def test_a_larger_batch_that_fits_above_one_that_does_not_is_found() -> None:
    """Bisection over these batches ends at 21: 22 does not fit, and 23, 25 and 26 do."""
    model = resolve_model("native:swinv2_large_384")
    assert isinstance(model, SwinConfig)
    gpu = find_gpu("rtx-4060-ti-8gb")
    model_, setting = resolve(model, TrainSetting(precision="bf16", checkpointing="blocks"))
    assert isinstance(model_, SwinConfig)
    found = largest_batch(model_, setting, gpu)
    assert found is not None
    best = found.setting.batch_size
    assert found.fits
    assert any(
        not estimate(model, setting, gpu=gpu, batch_size=b).fits for b in range(best - 5, best)
    )
    above = best + 1
    while least(found := estimate(model, setting, gpu=gpu, batch_size=above)) <= gpu.memory_bytes:
        assert not found.fits
        above += 1


@pytest.mark.parametrize(
    "budget_mib",
    [700, *(pytest.param(mib, marks=pytest.mark.combinations) for mib in (1000, 2000))],
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
