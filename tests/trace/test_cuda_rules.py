"""What CUDA does otherwise than the CPU, done in a trace too.

Legend: B batch, C channels, N tokens of a window; sizes in bytes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from planner.trace import cuda_rules  # noqa: E402
from planner.trace.cuda_rules import as_on_cuda  # noqa: E402


def test_policies_are_those_of_the_header() -> None:
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text()

    def listed(macro: str) -> set[str]:
        body = text.split(f"#define {macro}(_)")[1].split("\n\n")[0]
        found = re.findall(r"_\((\w+)(?:, (\w+))?\)", body)
        return {name + (f".{overload}" if overload else "") for name, overload in found}

    on_cpu = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    }
    lower = listed("AT_FORALL_LOWER_PRECISION_FP")
    assert set(cuda_rules._LOWER_PRECISION) == lower - on_cpu
    assert listed("AT_FORALL_FP32") - set(cuda_rules._FP32) <= on_cpu
    assert set(cuda_rules._FP32) <= listed("AT_FORALL_FP32")
    assert set(cuda_rules._FP32_BY_DTYPE_ARGUMENT) == listed("AT_FORALL_FP32_SET_OPT_DTYPE")
    assert set(cuda_rules._PROMOTE) == listed("AT_FORALL_PROMOTE")


def test_rules_last_as_long_as_their_context() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    before = {key: sorted(registered(key)) for key in ("AutocastCPU", "AutogradCPU")}
    x = torch.randn(2, 8, requires_grad=True)

    def norm() -> torch.dtype:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.layer_norm(F.linear(x, x), (2,)).dtype

    assert norm() == torch.bfloat16
    with as_on_cuda():
        assert norm() == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = F.linear(x, x)
            assert half.dtype == torch.bfloat16
            assert half.softmax(-1).dtype == half.sum().dtype == torch.float32
            assert half.norm().dtype == half.pow(2).dtype == torch.float32
            assert torch.cat([half, half.float()]).dtype == torch.float32
            assert torch.addcmul(half, half, half.float()).dtype == torch.float32
            assert F.gelu(half).dtype == (half + half).dtype == torch.bfloat16
            with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
                F.binary_cross_entropy(half.sigmoid(), half.sigmoid())
    assert norm() == torch.bfloat16
    assert {key: sorted(registered(key)) for key in before} == before
