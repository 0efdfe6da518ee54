"""Which kernel a trace attends with under an older torch (of the one that is installed:
tests/emulated/test_attention.py)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from planner.trace import attention  # noqa: E402
from planner.trace.attention import choose_kernel  # noqa: E402


def test_before_torch_2_14_only_flash_takes_fewer_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of 2.13.0 has no such memory-efficient kernel (pytorch's pull request 191085)."""
    monkeypatch.setattr(attention, "torch_version", lambda: (2, 13))
    query, key = torch.zeros(2, 4, 16, 64), torch.zeros(2, 2, 16, 64)
    assert choose_kernel(query, key, key, None, False, True) == "math"
    query, key = query.bfloat16(), key.bfloat16()
    assert choose_kernel(query, key, key, None, False, True) == "flash"
    assert choose_kernel(query, key[:, :1], key[:, :1], None, False, False) == "math"
