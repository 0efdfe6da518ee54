"""The largest batch that fits is the largest, although the allocator's bytes go up and down."""

from __future__ import annotations

from planner import Estimate, SwinConfig, estimate, find_gpu, largest_batch
from planner.core.schema import TrainSetting
from planner.estimation.estimate import resolve

TINY = SwinConfig(
    image_size=(56, 56), depths=(2, 2), num_heads=(1, 2), embed_dim=32, num_classes=10
)


def least(found: Estimate) -> int:
    """The device's bytes if the allocator kept nothing beside what is live."""
    return found.device_total_bytes - found.breakdown["allocator_overhead"]


def test_none_above_the_largest_fits() -> None:
    model, setting = resolve(TINY, TrainSetting())
    assert isinstance(model, SwinConfig)
    budget = 600 << 20
    found = largest_batch(model, setting, memory_bytes=budget)
    assert found is not None
    batch = found.setting.batch_size
    while least(above := estimate(TINY, batch_size=(batch := batch + 1))) <= budget:
        assert above.device_total_bytes > budget


def test_the_largest_batch_with_retries_is_where_memory_runs_out() -> None:
    """Under torch's own CUDA code on an emulated RTX 3090 (torch 2.13.0 and 2.15.0, 2026-11-23)
    fp32 ran at 243 and ended out of memory at 244, 245, 246 and 248. At 243 it had 22.99 GiB
    reserved, as predicted."""
    card = find_gpu("rtx-3090")
    found = [
        largest_batch("native:swin_tiny", gpu=card, precision="fp32", retries=retries)
        for retries in (False, True)
    ]
    assert [f and f.setting.batch_size for f in found] == [225, 243]
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
    ended = largest_batch(model, setting, find_gpu("h200"), ceiling=100)
    assert ended is not None
    assert ended.setting.batch_size == 100
    assert "batches above 100 are not looked at" in ended.assumed[-1]
