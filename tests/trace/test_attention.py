"""Which kernel a trace attends with, where no emulated GPU is: torch 2.14.1's own choices."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planner.trace import attention  # noqa: E402
from planner.trace.attention import choose_kernel  # noqa: E402

T4, A100 = (7, 5), (8, 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# (dtype, channels of queries and values, heads of keys, enable_gqa, mask) of 4 heads of queries:
# what `torch._fused_sdp_choice` said on emulated cards (2026-11-26).
@pytest.mark.parametrize(
    ("dtype", "channels", "heads", "gqa", "masked", "on_a100", "on_t4"),
    [
        (BF16, (64, 64), 4, False, False, "flash", "math"),
        (FP16, (64, 64), 4, False, False, "flash", "efficient"),
        (BF16, (64, 64), 2, True, False, "flash", "math"),
        (BF16, (64, 64), 2, True, True, "efficient", "math"),
        (BF16, (64, 64), 1, False, False, "flash", "math"),
        (BF16, (20, 20), 4, False, False, "flash", "math"),
        (BF16, (20, 20), 4, False, True, "math", "math"),
        (FP32, (20, 20), 4, False, False, "efficient", "efficient"),
        (FP32, (18, 18), 4, False, False, "math", "efficient"),
        (BF16, (320, 320), 4, False, False, "efficient", "math"),
        (BF16, (64, 128), 4, False, False, "efficient", "math"),
        (FP32, (512, 512), 4, False, False, "efficient", "efficient"),
        (torch.float64, (64, 64), 4, False, False, "math", "math"),
    ],
)
def test_the_kernel_is_the_one_that_torch_chooses(
    dtype: Any, channels: tuple[int, int], heads: int, gqa: bool, masked: bool,
    on_a100: str, on_t4: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(attention, "torch_version", lambda: (2, 14))
    query = torch.zeros(2, 4, 16, channels[0], dtype=dtype)
    key, value = (torch.zeros(2, heads, 16, n, dtype=dtype) for n in channels)
    mask = torch.zeros(16, 16, dtype=dtype) if masked else None
    found = [choose_kernel(query, key, value, mask, False, gqa, card) for card in (A100, T4)]
    assert found == [on_a100, on_t4]


def test_before_torch_2_14_only_flash_takes_fewer_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of 2.13.0 has no such memory-efficient kernel (pytorch's pull request 191085)."""
    monkeypatch.setattr(attention, "torch_version", lambda: (2, 13))
    query, key = torch.zeros(2, 4, 16, 64), torch.zeros(2, 2, 16, 64)
    assert choose_kernel(query, key, key, None, False, True) == "math"
    query, key = query.bfloat16(), key.bfloat16()
    assert choose_kernel(query, key, key, None, False, True) == "flash"
    assert choose_kernel(query, key[:, :1], key[:, :1], None, False, False) == "math"
