"""What the backward of memory-efficient attention takes besides its results."""

from __future__ import annotations

import pytest

from planner import estimate
from planner.libraries.resolve import resolve_model
from planner.step.attention import backward_scratch


def test_the_workspace_is_a_block_for_each_64_queries_of_a_head() -> None:
    """Derived: Swin-T's first stage at batch 64: 4,096 windows, 3 heads, 49 queries, one block of
    16 + 64 * 64 * 4 B each."""
    found = backward_scratch((4096, 3, 49, 32), is_half=True)
    assert found == (0, 0, 4096 * 3 * 49 * 4, 201_523_200)
    # Windows of 12: 144 queries are three blocks; heads wider than 64 channels are two.
    assert backward_scratch((10, 2, 144, 32), is_half=True).workspace == 10 * 2 * 3 * 16_400
    assert backward_scratch((10, 2, 49, 96), is_half=True).workspace == 10 * 2 * 2 * 16_400


def test_in_fp32_the_whole_product_comes_first() -> None:
    delta = 10 * 2 * 49 * 4
    assert backward_scratch((10, 2, 49, 32), is_half=False)[:3] == (32 * delta, delta, delta)
    assert backward_scratch((10, 1, 49, 32), is_half=False).sums == 0  # no copy to turn it round


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_reserved_peak_knows_it(precision: str) -> None:
    """The peak of live bytes of Swin-T is where the last stage sums: what moves is reserved."""
    model = resolve_model("native:swin_tiny")
    found = estimate(model, batch_size=64, precision=precision, attention="sdpa")
    assert any("kernels other than those" in line for line in found.left_out)
    if precision == "bf16":  # 4.27 GiB without the scratch
        assert found.peak_reserved_bytes / 2**30 == pytest.approx(4.46, abs=0.02)


def test_lora_says_that_cudnn_may_attend() -> None:
    said = estimate("native:swin_tiny", batch_size=8, lora_rank=4, attention="sdpa").left_out
    assert any("cuDNN's attention" in line for line in said)
    plain = estimate("native:swin_tiny", batch_size=8, attention="sdpa").left_out
    assert not any("cuDNN's attention" in line for line in plain)
