"""The trace of the real module: derived numbers, CUDA's rules, and real memory events beside it.

Legend: B batch, C channels, N tokens of a window; sizes in bytes, each request rounded to 512.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from planner.errors import PlannerError, UnsupportedError  # noqa: E402
from planner.ledger import Allocated, Computed, Event, Freed, Marked, Tagged  # noqa: E402
from planner.libraries.torchvision.import_shim import declare_missing_operators  # noqa: E402
from planner.schema import FactoryModel, SwinConfig, TrainSetting  # noqa: E402
from planner.trace import (  # noqa: E402
    Trace,
    cuda_rules,
    measure_cpu_memory_events,
    trace_estimate,
    trace_training,
)
from planner.trace.__main__ import main as print_trace  # noqa: E402
from planner.trace.cuda_rules import as_on_cuda  # noqa: E402
from planner.trace.run import rounded  # noqa: E402

SMALL = SwinConfig(
    image_size=64, num_classes=10, embed_dim=32, depths=(2, 2), num_heads=(1, 2), window_size=4
)
TINY_IMAGES = FactoryModel(factory="tests:none", image_size=(4, 4), num_classes=10)


def swin_timm(version: int) -> nn.Module:
    declare_missing_operators()
    timm = pytest.importorskip("timm")
    kind = (
        timm.models.swin_transformer.SwinTransformer
        if version == 1
        else timm.models.swin_transformer_v2.SwinTransformerV2
    )
    return kind(
        img_size=64,
        window_size=4,
        embed_dim=32,
        depths=(2, 2),
        num_heads=(1, 2),
        num_classes=10,
        drop_path_rate=0.1,
    )


def swin_torchvision(version: int) -> nn.Module:
    declare_missing_operators()
    pytest.importorskip("torchvision")
    from torchvision.models import swin_transformer as tv

    block = tv.SwinTransformerBlock if version == 1 else tv.SwinTransformerBlockV2
    merge = tv.PatchMerging if version == 1 else tv.PatchMergingV2
    return tv.SwinTransformer(
        [4, 4],
        32,
        [2, 2],
        [1, 2],
        [4, 4],
        num_classes=10,
        stochastic_depth_prob=0.1,
        block=block,
        downsample_layer=merge,
    )


def swin_transformers(version: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config, kind = (
        (transformers.SwinConfig, transformers.SwinForImageClassification)
        if version == 1
        else (transformers.Swinv2Config, transformers.Swinv2ForImageClassification)
    )
    given = config(
        image_size=64,
        patch_size=4,
        embed_dim=32,
        depths=[2, 2],
        num_heads=[1, 2],
        window_size=4,
        num_labels=10,
    )
    given._attn_implementation = "eager"
    return kind(given)


LIBRARIES: dict[str, Callable[[int], nn.Module]] = {
    "timm": swin_timm,
    "torchvision": swin_torchvision,
    "transformers": swin_transformers,
}


class Classifier(nn.Module):
    """One Linear over all pixels: 3·4·4 = 48 numbers an image."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))


def labels(trace: Trace, step: int = 1) -> Counter[str]:
    """How often each operation allocated in `step`, the last phase's name left out."""
    found: Counter[str] = Counter()
    inside = step == 0
    for event in trace.events:
        if isinstance(event, Allocated) and inside:
            found[event.label] += 1
        elif isinstance(event, Marked) and event.phase == "zero_grad":
            inside = event.step == step - 1
    return found


def test_saved_bytes_of_a_linear_are_the_derived_ones() -> None:
    batch = 64
    setting = TrainSetting(batch_size=batch, precision="fp32", optimizer="sgd")
    trace = trace_training(Classifier, TINY_IMAGES, setting)
    # log_softmax's output for its own backward, nll_loss's total weight, the loss itself. The
    # logits are released, the images were there before.
    assert trace.saved_bytes() == rounded(batch * 10 * 4) + 512 + 512
    weights = rounded(48 * 10 * 4) + rounded(10 * 4)
    data = rounded(batch * 48 * 4) + rounded(batch * 8)
    ends = dict(trace.phase_ends())
    assert ends["zero_grad"] == 2 * weights + data  # parameters and momentum
    assert ends["optimizer"] == ends["backward"] == 3 * weights + data


def test_bf16_saves_the_casts_of_a_linear() -> None:
    batch = 64
    fp32, bf16 = (
        trace_training(Classifier, TINY_IMAGES, TrainSetting(batch_size=batch, precision=p))
        for p in ("fp32", "bf16")
    )
    # The weight's gradient needs the cast input; the images need no gradient, so the cast weight is
    # not saved. cross_entropy asks log_softmax for the logits' own dtype, which autocast respects;
    # nll_loss is in fp32, and keeps the copy made for it.
    casts = rounded(batch * 48 * 2) + rounded(batch * 10 * 2)
    assert bf16.saved_bytes() - fp32.saved_bytes() == casts


def test_peak_is_of_the_step_asked_for() -> None:
    setting = TrainSetting(batch_size=1024, precision="fp32")
    trace = trace_training(Classifier, TINY_IMAGES, setting)
    state = 2 * (rounded(48 * 10 * 4) + rounded(10 * 4))
    assert trace.peak_live_bytes(1) - trace.peak_live_bytes(0) == state  # Adam's, made by step 0
    assert trace.peak_live_bytes() == trace.peak_live_bytes(1)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_in_place_trace_equals_real_memory_events(
    library: str, version: int, optimizer: str
) -> None:
    """The profiler's events of the real fp32 module on CPU tensors (torch 2.13)."""
    if optimizer != "adamw" and library != "timm":
        pytest.skip("one library shows the optimizer")
    setting = TrainSetting(batch_size=4, precision="fp32", optimizer=optimizer)

    def build() -> nn.Module:
        return LIBRARIES[library](version)

    traced = trace_training(build, SMALL, setting, gradient_sums="in_place")
    real = measure_cpu_memory_events(build, SMALL, setting)
    assert traced.num_parameters == real.num_parameters
    assert traced.phase_ends() == real.phase_ends()
    assert traced.saved_bytes() == real.saved_bytes()
    assert traced.peak_live_bytes() == real.peak_live_bytes()


class Branches(nn.Module):
    """A large tensor with three users: at the first sum of its gradients, that of the third user
    is still to come, and the step is at its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        wide = (images * self.scale).repeat(1, 8, 1, 1)
        both = torch.add(torch.add(wide * 2, wide, alpha=3), wide, alpha=4)
        return self.head(both[:, :3].flatten(1))


def test_sums_in_place_lower_the_peak_by_the_sum() -> None:
    batch = 512
    setting = TrainSetting(batch_size=batch, precision="fp32", optimizer="sgd")
    real = measure_cpu_memory_events(Branches, TINY_IMAGES, setting)
    out, inside = (
        trace_training(Branches, TINY_IMAGES, setting, gradient_sums=sums)
        for sums in ("out_of_place", "in_place")
    )
    assert inside.peak_live_bytes() == real.peak_live_bytes()
    assert out.peak_live_bytes() - inside.peak_live_bytes() == batch * 24 * 16 * 4
    assert labels(out)["aten.add.Tensor"] - labels(inside)["aten.add.Tensor"] == 2


def test_shared_gradients_are_not_summed_in_place() -> None:
    """A gradient that a view shares its storage with stays as it is, as in eager."""

    class Shared(Branches):
        def forward(self, images: Tensor) -> Tensor:
            wide = (images * self.scale).repeat(1, 8, 1, 1)
            rows = wide.cos().flatten(1)[:, :48] + wide.view(-1, 384).sin()[:, :48]
            return self.head(rows)

    setting = TrainSetting(batch_size=64, precision="fp32", optimizer="sgd")
    real = measure_cpu_memory_events(Shared, TINY_IMAGES, setting)
    traced = trace_training(Shared, TINY_IMAGES, setting, gradient_sums="in_place")
    assert labels(traced)["aten.add.Tensor"] == 2  # the forward's own, and the gradients'
    assert traced.peak_live_bytes() == real.peak_live_bytes()


def test_a_rewritten_view_gets_a_gradient_of_its_own() -> None:
    """An in-place ReLU on `linear`'s result, which is a view: in eager, not in a dispatch mode, its
    gradient is copied into new zeros."""

    class Rewritten(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(4, 64)

        def forward(self, images: Tensor) -> Tensor:
            x = F.relu(self.wide(images), inplace=True)  # [B, 3, 4, 64]
            return self.head(x.mean(3).repeat(1, 1, 4).flatten(1))

    setting = TrainSetting(batch_size=512, precision="fp32", optimizer="sgd")
    real = measure_cpu_memory_events(Rewritten, TINY_IMAGES, setting)
    out, inside = (
        trace_training(Rewritten, TINY_IMAGES, setting, gradient_sums=sums)
        for sums in ("out_of_place", "in_place")
    )
    wide = 512 * 3 * 4 * 64 * 4

    def copies(trace: Trace) -> int:
        return sum(e.num_bytes == wide for e in trace.events if isinstance(e, Allocated))

    assert copies(inside) == copies(real) == copies(out) + 2  # one a step
    assert inside.peak_live_bytes() == real.peak_live_bytes()


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
    """Attention of one head over N tokens with a learned bias, by PyTorch's fused function."""

    def __init__(self, tokens: int = 49, channels: int = 32, biased: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 3 * channels)
        self.bias = nn.Parameter(torch.zeros(tokens, tokens)) if biased else None
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.qkv(images.flatten(2).transpose(1, 2))
        q, k, v = x.unflatten(2, (3, 1, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.head(F.scaled_dot_product_attention(q, k, v, self.bias).mean((1, 2)))


def attention_events(trace: Trace, part: str) -> list[int]:
    return [e.num_bytes for e in trace.events if isinstance(e, Allocated) and part in e.label]


def test_fused_attention_with_a_mask_is_the_memory_efficient_one() -> None:
    batch, tokens, channels = 4, 49, 32
    images = FactoryModel(factory="tests:none", image_size=(7, 7), num_classes=10)
    setting = TrainSetting(batch_size=batch, precision="bf16")
    trace = trace_training(Window, images, setting, num_steps=1)
    output = batch * tokens * channels * 2
    logsumexp = batch * 64 * 4  # one head, rows rounded up to 32
    gradient_of_bias = batch * tokens * 64 * 2  # rows rounded up to 16
    forward = attention_events(trace, "_efficient_attention.default")
    assert forward == [output, logsumexp]  # seed and offset stay on the host
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


def test_dropout_keeps_one_byte_an_element() -> None:
    class Dropped(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            return self.head(F.dropout(images.flatten(1), 0.5, self.training))

    trace = trace_training(
        Dropped, TINY_IMAGES, TrainSetting(batch_size=4, precision="fp32"), num_steps=1
    )
    assert attention_events(trace, "native_dropout.default") == [4 * 48 * 4, 4 * 48]


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


def test_step_scalars_are_on_the_device_only_when_fused() -> None:
    ends = {}
    for optimizer in ("adamw", "adamw-forloop", "nadam", "rmsprop", "adamw-fused"):
        setting = TrainSetting(batch_size=4, precision="fp32", optimizer=optimizer)
        trace = trace_training(Classifier, TINY_IMAGES, setting)
        ends[optimizer] = dict(trace.phase_ends())["zero_grad"]
    assert ends["adamw"] == ends["adamw-forloop"] == ends["nadam"]  # two moments each
    assert ends["adamw"] - ends["rmsprop"] == rounded(48 * 10 * 4) + rounded(10 * 4)  # one
    assert ends["adamw-fused"] - ends["adamw"] == 2 * 512  # weight and bias


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp16"},
        {"precision": "fp16", "optimizer": "adamw-fused"},
        {"precision": "fp16", "clip_grad": True},
        {"clip_grad": True},
        {"optimizer": "sgd-fused"},
        {"optimizer": "adafactor"},
        {"optimizer": "nadam"},
        {"optimizer": "radam-forloop"},
        {"optimizer": "rmsprop"},
        {"amsgrad": True},
        {"ema": True},
        {"accumulate": 2},
        {"loss": "label-smoothing"},
        {"loss": "soft-target"},
        {"zero_grad_to_none": False},
        {"memory_format": "channels_last"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_every_way_to_step_is_steady(fields: dict[str, object]) -> None:
    """From the second step on, a step ends with what it began with."""
    setting = TrainSetting(batch_size=2, **fields)
    trace = trace_training(Classifier, TINY_IMAGES, setting, num_steps=3)
    assert trace.phase_ends(1) == trace.phase_ends(2)
    assert trace.peak_live_bytes(1) == trace.peak_live_bytes(2)


def test_clipping_takes_foreach() -> None:
    setting = TrainSetting(batch_size=2, precision="fp32", clip_grad=True)
    trace = trace_training(Classifier, TINY_IMAGES, setting)
    assert labels(trace)["aten._foreach_norm.Scalar"] == 2


def test_reference_counts_alone_free_everything() -> None:
    """The collector is off in a trace, so a cycle would leave fake tensors behind."""
    setting = TrainSetting(batch_size=2, precision="bf16")
    gc.collect()
    gc.disable()
    try:
        before = [o for o in gc.get_objects() if type(o) in (FakeTensor, nn.Parameter)]
        trace = trace_training(lambda: swin_timm(1), SMALL, setting)
        after = [o for o in gc.get_objects() if type(o) in (FakeTensor, nn.Parameter)]
    finally:
        gc.enable()
    assert len(after) == len(before)
    assert trace.events


def storage_events(events: tuple[Event, ...]) -> list[object]:
    """Allocations and marks in order; the releases between two of them as a set, since autocast
    frees its cache in the order of addresses."""
    rows: list[object] = []
    freed: list[int] = []
    for event in events:
        if isinstance(event, Freed):
            freed.append(event.storage)
        elif isinstance(event, Allocated | Marked):
            rows.append(sorted(freed))
            freed = []
            rows.append(event[:2])
    return [*rows, sorted(freed)]


@pytest.fixture(scope="module")
def timm_ledger():  # type: ignore[no-untyped-def]
    setting = TrainSetting(batch_size=2, precision="bf16")
    return trace_estimate(SMALL, setting, lambda: swin_timm(1))


def test_ledger_has_the_storages_of_the_trace(timm_ledger) -> None:  # type: ignore[no-untyped-def]
    setting = TrainSetting(batch_size=2, precision="bf16")
    trace = trace_training(lambda: swin_timm(1), SMALL, setting, gradient_sums="in_place")
    assert storage_events(timm_ledger.events) == storage_events(trace.events)
    assert timm_ledger.num_parameters == trace.num_parameters
    assert timm_ledger.batch_size == 2


def test_ledger_sorts_bytes_by_category(timm_ledger) -> None:  # type: ignore[no-untyped-def]
    sizes: dict[int, int] = {}
    category: dict[int, str] = {}
    by_phase: dict[tuple[str, int], Counter[str]] = {}
    for event in timm_ledger.events:
        if isinstance(event, Allocated):
            sizes[event.storage] = event.num_bytes
            category[event.storage] = "temporaries"
        elif isinstance(event, Tagged):
            category[event.storage] = event.category
        elif isinstance(event, Freed):
            del sizes[event.storage]
        elif isinstance(event, Marked):
            found: Counter[str] = Counter()
            for storage, num_bytes in sizes.items():
                found[category[storage]] += num_bytes
            by_phase[event.phase, event.step] = found
    weights = 4 * timm_ledger.num_parameters
    data = 2 * (3 * 64 * 64 * 4 + 8)
    end = by_phase["optimizer", 1]
    assert end["parameters"] == end["gradients"] == weights
    assert end["optimizer_state"] == 2 * weights
    assert end["activations"] == data
    assert end["temporaries"] == 0
    assert by_phase["forward", 1]["temporaries"] == by_phase["forward", 1]["gradients"] == 0


def test_ledger_counts_work_and_names_modules(timm_ledger) -> None:  # type: ignore[no-untyped-def]
    work = [(phase, o) for phase, o in timm_ledger.operations()]
    assert {phase for phase, _ in work} == {"forward", "backward", "optimizer"}
    head = next(o for _, o in work if o.path == "head.fc" and o.kind == "matmul")
    assert head == Computed(
        "aten.addmm",
        "matmul",
        "bfloat16",
        2 * 2 * 64 * 10,
        (2 * 64 + 64 * 10 + 10 + 2 * 10) * 2,
        1,
        "head.fc",
    )
    flops = Counter({phase: 0 for phase, _ in work})
    for phase, operation in work:
        if operation.kind in ("matmul", "conv"):
            flops[phase] += operation.flops
    # Backward does each product twice, but for the patch embedding, whose input needs no gradient.
    embedding = next(o.flops for _, o in work if o.kind == "conv")
    assert flops["backward"] == 2 * flops["forward"] - embedding
    assert "aten.gelu" in {o.name for _, o in work if o.kind == "pointwise"}


def test_recomputed_activations_are_activations() -> None:
    """At the peak under checkpointing, what the recomputed block saved is alive once more."""

    def build() -> nn.Module:
        module = swin_timm(1)
        module.set_grad_checkpointing()
        return module

    ledger = trace_estimate(SMALL, TrainSetting(batch_size=8, precision="fp32"), build)
    category: dict[int, str] = {}
    sizes: dict[int, int] = {}
    kinds: list[Counter[str]] = []
    for event in ledger.events:
        if isinstance(event, Allocated):
            sizes[event.storage] = event.num_bytes
            category[event.storage] = "temporaries"
        elif isinstance(event, Tagged):
            category[event.storage] = event.category
        elif isinstance(event, Freed):
            del sizes[event.storage]
        found: Counter[str] = Counter()
        for storage, num_bytes in sizes.items():
            found[category[storage]] += num_bytes
        kinds.append(found)
    forward, backward = (
        next(i for i, e in enumerate(ledger.events) if e == Marked(phase, 1))
        for phase in ("forward", "backward")
    )
    at_end = kinds[forward]["activations"]
    highest = max(kinds[i]["activations"] for i in range(forward, backward))
    # fp32 saves 4C(16 + N/32) + 16 bytes a token and block (C 32, N 16, 256 tokens an image)
    # and keeps of it one block's input, 4C, for each.
    saved = 8 * 256 * (4 * 32 * (16 + 16 / 32) + 16)
    assert highest - at_end == pytest.approx(saved, rel=0.25)
    assert kinds[backward]["buffers"] == kinds[forward]["buffers"] > 0
    assert kinds[backward]["parameters"] == 4 * ledger.num_parameters


def test_a_model_that_reads_values_is_told_so() -> None:
    class Reads(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * images.mean().item()

    with pytest.raises(UnsupportedError, match="_local_scalar_dense"):
        trace_estimate(TINY_IMAGES, TrainSetting(batch_size=2), Reads)


def test_a_model_that_breaks_names_the_operation() -> None:
    class Breaks(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images[images > 0])

    with pytest.raises(PlannerError, match=r"aten\.(nonzero|index)\.\w+ broke on fake tensors"):
        trace_estimate(TINY_IMAGES, TrainSetting(batch_size=2), Breaks)


def test_a_model_that_raises_says_where() -> None:
    class Raises(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            raise ValueError("no such stage")

    with pytest.raises(PlannerError, match=r"ValueError .*test_trace\.py:\d+: no such stage"):
        trace_estimate(TINY_IMAGES, TrainSetting(batch_size=2), Raises)


def test_what_a_trace_does_not_follow_is_refused() -> None:
    setting = TrainSetting(parallelism="ddp", checkpointing="blocks")
    with pytest.raises(UnsupportedError, match="one device") as refused:
        trace_estimate(TINY_IMAGES, setting, Classifier)
    assert "checkpointing" in str(refused.value)


DRAWS = """
import torch
from torch import nn
from planner.schema import TrainSetting
from planner.trace.building import build_module

WIDTH = 384  # 576 KiB: memory that has just been freed is given out again as it is

def build():
    layer = nn.Linear(WIDTH, WIDTH)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    return layer

for _ in range(5):
    junk = [torch.full((WIDTH, WIDTH), 9.0) for _ in range(40)]
    kept = junk[::2]
    del junk
    build_module(build, TrainSetting())
"""


def test_initialisers_that_draw_until_values_fit_come_to_an_end() -> None:
    """`trunc_normal_` looks at values, and large weights have whatever was in memory."""
    subprocess.run([sys.executable, "-c", DRAWS], check=True, timeout=120)


class Pooled(Classifier):
    """For images of any size: the mean over 4 x 4 cells."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(F.adaptive_avg_pool2d(images, 4))


def test_printed_events(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"{__name__}:Pooled"
    monkeypatch.setattr("sys.argv", ["trace", spec, "--batch-size", "2", "precision=fp32"])
    print_trace()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["+", "1920", "2048", "#0", "weight"]
    data = rounded(2 * 3 * 224 * 224 * 4) + rounded(2 * 8)
    assert f"= build 0: live {data + 2048 + 512}" in lines
    assert lines[-1].startswith("-")  # the batch and the model go last
    allocated = sum(line.startswith("+") for line in lines)
    freed = sum(line.startswith("-") for line in lines)
    assert allocated - freed == 2  # the weights outlive the recording


def test_printing_an_unknown_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["trace", "native:swin_tinny"])
    with pytest.raises(SystemExit) as stopped:
        print_trace()
    assert stopped.value.code == 2
    assert "Did you mean 'swin_tiny'" in capsys.readouterr().err


def test_building_leaves_large_weights_unwritten() -> None:
    """A weight of 16 GiB is built at once: nobody writes its pages."""

    class Wide(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(1 << 16, 1 << 16)

    setting = TrainSetting(batch_size=1, precision="fp32", optimizer="sgd")
    trace = trace_training(Wide, TINY_IMAGES, setting, num_steps=1)
    assert trace.num_parameters > 1 << 32


def test_a_tied_weight_is_counted_once() -> None:
    class Tied(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.same = self.head
            self.also = nn.Linear(48, 10)
            self.also.weight = self.head.weight

    setting = TrainSetting(batch_size=1, precision="fp32", optimizer="sgd")
    trace = trace_training(Tied, TINY_IMAGES, setting, num_steps=1)
    assert trace.num_parameters == 48 * 10 + 2 * 10


def test_the_mode_of_a_caller_is_left_alone() -> None:
    with FakeTensorMode():
        trace_training(Classifier, TINY_IMAGES, TrainSetting(batch_size=1, precision="fp32"))
        assert isinstance(torch.zeros(1), FakeTensor)
    assert gc.isenabled()
