"""What CUDA does otherwise than the CPU, done in a trace too.

Legend: B batch, C channels, N tokens of a window; sizes in bytes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from planner.core.schema import FactoryModel, TrainSetting  # noqa: E402
from planner.core.torch_version import torch_version  # noqa: E402
from planner.step.attention import SEED_ON_DEVICE  # noqa: E402
from planner.trace import cuda_rules  # noqa: E402
from planner.trace.cuda_rules import as_on_cuda  # noqa: E402
from planner.trace.run import trace_training  # noqa: E402
from tests.trace.models import (  # noqa: E402
    attention_events,
)


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


class Window(nn.Module):
    """Attention of one head over N tokens with a learned bias, by PyTorch's fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 3 * 32)
        self.bias = nn.Parameter(torch.zeros(49, 49))
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.qkv(images.flatten(2).transpose(1, 2))
        q, k, v = x.unflatten(2, (3, 1, -1)).permute(2, 0, 3, 1, 4).unbind(0)

        return self.head(F.scaled_dot_product_attention(q, k, v, self.bias).flatten(1, -2).mean(1))


def test_fused_attention_with_a_mask_is_the_memory_efficient_one() -> None:
    batch, tokens, channels = 4, 49, 32
    images = FactoryModel(factory="tests:none", image_size=(7, 7), num_classes=10)
    setting = TrainSetting(batch_size=batch, precision="bf16")
    trace = trace_training(Window, images, setting, num_steps=1)
    output = batch * tokens * channels * 2
    logsumexp = batch * 64 * 4  # one head, rows rounded up to 32
    gradient_of_bias = batch * tokens * 64 * 2  # rows rounded up to 16
    forward = attention_events(trace, "_efficient_attention.default")
    seeds = [] if torch_version() < SEED_ON_DEVICE else [8, 8]  # with the offset; else on the host
    assert forward == [*seeds, output, logsumexp]
    backward = attention_events(trace, "_efficient_attention_backward")
    delta, workspace = batch * tokens * 4, batch * (16 + 64 * 64 * 4)  # one head, one block
    assert backward == [output, output, output, gradient_of_bias, delta, workspace]
    padded, gradient = attention_events(trace, "constant_pad_nd")
    assert padded == tokens * 56 * 2  # rows rounded up to 8
    assert gradient == tokens * tokens * 2
