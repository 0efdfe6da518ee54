"""What CUDA does otherwise than the CPU, done in a trace too.

Legend: B batch, C channels, N tokens of a window; sizes in bytes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._dispatch.python import enable_python_dispatcher  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from planner.core.schema import FactoryModel, TrainSetting  # noqa: E402
from planner.core.torch_version import torch_version  # noqa: E402
from planner.step.attention import SEED_ON_DEVICE  # noqa: E402
from planner.trace import attention, cuda_rules  # noqa: E402
from planner.trace.cuda_rules import as_on_cuda  # noqa: E402
from planner.trace.run import trace_training  # noqa: E402
from tests.trace.models import (  # noqa: E402
    TINY_IMAGES,
    Classifier,
    attention_events,
    labels,
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


class Operations(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attend() -> str:
    """The fused attention that runs where operations are dispatched in Python."""
    with FakeTensorMode():
        tokens = torch.zeros(1, 1, 8, 8, requires_grad=True)
        with Operations() as ran, enable_python_dispatcher():
            F.scaled_dot_product_attention(tokens, tokens, tokens)
    (name,) = [name for name in ran.names if "attention" in name]
    return name


def test_what_torch_remembers_of_its_dispatch_decides_neither_within_nor_after() -> None:
    before = attend()  # as a compilation would: what was dispatched is remembered
    with as_on_cuda():
        assert attend() == "_scaled_dot_product_efficient_attention"
    assert attend() == before == "_scaled_dot_product_flash_attention_for_cpu"


def test_softmax_of_half_converts_inside_its_kernel() -> None:
    class Attend(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            return self.head(images.flatten(1)).softmax(-1)

    counts = {
        precision: labels(
            trace_training(Attend, TINY_IMAGES, TrainSetting(batch_size=4, precision=precision))
        )["aten._to_copy.default"]
        for precision in ("bf16", "fp16")
    }
    # fp16 makes no fp32 copy before softmax and none of its gradient after, and 5 for the scaler:
    # the inverse scale as double and back, its copy and found_inf's.
    assert counts["bf16"] - (counts["fp16"] - 4) == 2


class Window(nn.Module):
    """Attention of one head over N tokens with a learned bias, by PyTorch's fused function: over
    [B, 1, N, C], or over [B, N, C] where it is `flat`."""

    def __init__(
        self, tokens: int = 49, channels: int = 32, biased: bool = True, flat: bool = False
    ) -> None:
        super().__init__()
        self.flat = flat
        self.qkv = nn.Linear(3, 3 * channels)
        self.bias = nn.Parameter(torch.zeros(tokens, tokens)) if biased else None
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.qkv(images.flatten(2).transpose(1, 2))
        q, k, v = x.unflatten(2, (3, 1, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.flat:
            q, k, v = q.squeeze(1), k.squeeze(1), v.squeeze(1)
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


@pytest.mark.parametrize(("precision", "kernel"), [("bf16", "flash"), ("fp32", "efficient")])
def test_fused_attention_without_a_mask(precision: str, kernel: str) -> None:
    images = FactoryModel(factory="tests:none", image_size=(7, 7), num_classes=10)
    setting = TrainSetting(batch_size=2, precision=precision)
    trace = trace_training(lambda: Window(biased=False), images, setting, num_steps=1)
    assert attention_events(trace, f"_scaled_dot_product_{kernel}_attention.default")


@pytest.mark.parametrize(
    ("version", "biased", "kernel"),
    [
        ((2, 13), False, "aten._safe_softmax.default"),
        ((2, 14), False, "aten._scaled_dot_product_flash_attention.default"),
        ((2, 14), True, "aten._scaled_dot_product_efficient_attention.default"),
    ],
)
def test_attention_without_a_batch_is_fused_from_torch_2_14(
    version: tuple[int, int], biased: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "torch_version", lambda: version)
    images = FactoryModel(factory="tests:none", image_size=(7, 7), num_classes=10)
    setting = TrainSetting(batch_size=2, precision="bf16")
    trace = trace_training(lambda: Window(biased=biased, flat=True), images, setting)
    names = {name for name in labels(trace) if "attention" in name or "safe_softmax" in name}
    assert {name for name in names if "backward" not in name} == {kernel}


def test_dropout_keeps_one_byte_an_element() -> None:
    class Dropped(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            return self.head(F.dropout(images.flatten(1), 0.5, self.training))

    trace = trace_training(
        Dropped, TINY_IMAGES, TrainSetting(batch_size=4, precision="fp32"), num_steps=1
    )
    assert attention_events(trace, "native_dropout.default") == [4 * 48, 4 * 48 * 4]


def test_statistics_of_layer_norm_are_fp32_on_cuda() -> None:
    class Normed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(48)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.norm(images.flatten(1)))

    setting = TrainSetting(batch_size=8, precision="pure-bf16")
    trace = trace_training(Normed, TINY_IMAGES, setting, num_steps=1)
    assert attention_events(trace, "native_layer_norm.default") == [8 * 48 * 2, 8 * 4, 8 * 4]


def test_statistics_of_batch_norm_are_fp32_on_cuda() -> None:
    class Normed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(48, 64)
            self.norm = nn.BatchNorm1d(64)
            self.head = nn.Linear(64, 10)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.norm(self.wide(images.flatten(1))))

    trace = trace_training(
        Normed, TINY_IMAGES, TrainSetting(batch_size=8, precision="bf16"), num_steps=1
    )
    assert attention_events(trace, "native_batch_norm.default") == [8 * 64 * 2, 64 * 4, 64 * 4]


class Strided(nn.Module):
    """Linear layers over tokens [B, 2, C], of which the first are a view with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(48, 32), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.lift(images.flatten(1)).unflatten(1, (2, 16))
        logits: Tensor = self.head(tokens[:, :1]).squeeze(1)
        return logits


def test_a_bias_is_added_in_place_to_what_is_not_contiguous() -> None:
    setting = TrainSetting(batch_size=4, precision="bf16")
    found = labels(trace_training(Strided, TINY_IMAGES, setting))
    assert "aten.add.Tensor" not in found
    assert "aten.mm.default" in found
