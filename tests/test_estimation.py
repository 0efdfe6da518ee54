"""What an estimate says: laws that hold for every model, and figures that were known before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Estimate, SwinConfig, TrainSetting, estimate, find_gpu, largest_batch
from planner.core.torch_version import as_of
from planner.estimation.estimate import resolve
from planner.estimation.ledgers import FusedAttention, left_out
from planner.machine.hardware.overheads import CONTEXT_BYTES_LOW
from tests.steps import TINY

BREAKDOWN = {
    "parameters", "buffers", "gradients", "optimizer_state", "activations", "temporaries",
    "workspace", "allocator_overhead", "cuda_context",
}  # fmt: skip


@st.composite
def settings_drawn(draw: st.DrawFn) -> TrainSetting:
    return TrainSetting(
        batch_size=draw(st.integers(1, 48)),
        accumulate=draw(st.sampled_from([1, 2, 5])),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16", "pure-bf16"])),
        checkpointing=draw(
            st.sampled_from(
                ["none", "blocks", "blocks:3", "blocks:every-2", "selective", "stages", "stages:1"]
            )
        ),
        attention=draw(st.sampled_from(["eager", "sdpa"])),
        optimizer=draw(st.sampled_from(["adamw", "adamw-fused", "sgd"])),
    )


@given(settings_drawn())
@settings(max_examples=15, deadline=None)
def test_the_total_is_the_sum_of_its_parts_and_the_totals_contain_each_other(
    setting: TrainSetting,
) -> None:
    found = estimate(TINY, setting)
    assert set(found.breakdown) == BREAKDOWN
    assert sum(found.breakdown.values()) == found.device_total_bytes
    assert all(size >= 0 for size in found.breakdown.values())
    assert found.saved_activation_bytes <= found.peak_live_bytes <= found.peak_allocated_bytes
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes < found.device_total_bytes
    assert found.low_bytes <= found.device_total_bytes <= found.high_bytes


@given(settings_drawn(), st.integers(1, 40))
@settings(max_examples=10, deadline=None)
def test_memory_rises_with_the_batch(setting: TrainSetting, more: int) -> None:
    larger = setting.model_copy(update={"batch_size": setting.batch_size + more})
    a, b = estimate(TINY, setting), estimate(TINY, larger)
    assert a.peak_live_bytes <= b.peak_live_bytes
    assert a.saved_activation_bytes < b.saved_activation_bytes


@given(settings_drawn())
@settings(max_examples=10, deadline=None)
def test_checkpointing_never_adds_saved_bytes(setting: TrainSetting) -> None:
    plain = setting.model_copy(update={"checkpointing": "none"})
    assert (
        estimate(TINY, setting).saved_activation_bytes
        <= estimate(TINY, plain).saved_activation_bytes
    )


def test_defaults_follow_the_gpu_and_the_library() -> None:
    assert estimate("native:swin_tiny", gpu="t4").setting.precision == "fp16"  # no bf16 units
    assert estimate("native:swin_tiny", gpu="rtx 3090").setting.precision == "bf16"
    assert estimate("timm:swin_tiny_patch4_window7_224").setting.attention == "eager"
    assert estimate("native:swin_tiny").setting.attention == "sdpa"


def test_the_verdict_is_against_the_memory_that_is_named() -> None:
    card = find_gpu("rtx 3090")
    assert estimate("native:swin_tiny", gpu=card, batch_size=64).fits is True
    assert estimate("native:swin_tiny", gpu=card, batch_size=1000).fits is False
    named = estimate("native:swin_tiny", gpu=card, batch_size=64, memory_bytes=1 << 30)
    assert named.fits is False
    assert named.budget_bytes == 1 << 30
    assert named.headroom_bytes == (1 << 30) - named.device_total_bytes


def test_the_range_says_what_it_rests_on() -> None:
    """Narrow where torch's own CUDA code was seen to reserve what is predicted."""

    def shares(gpu: str | None, **changes: object) -> tuple[str, float]:
        found = estimate(TINY, gpu=gpu, **changes)
        reserved = found.low_bytes - CONTEXT_BYTES_LOW
        said = next(text for text in found.assumed if text.startswith("reserved memory within"))
        return said.split(":")[0], round(1 - reserved / found.peak_reserved_bytes, 3)

    assert shares("rtx-3090") == shares(None) == ("reserved memory within 2%", 0.02)
    assert shares("mi300x") == ("reserved memory within 9%", 0.09)
    with as_of("2.16.0"):
        assert shares("rtx-3090") == ("reserved memory within 9%", 0.09)
    several = estimate(TINY, gpu="rtx-3090", world_size=2, parallelism="ddp")
    assert any("reserved memory within 9%" in text for text in several.assumed)


def test_what_a_predicted_time_leaves_out_is_said_with_the_rest() -> None:
    with_time = estimate("native:swin_tiny", batch_size=2, gpu="RTX 3090")
    without = estimate("native:swin_tiny", batch_size=2)
    (of_time,) = [line for line in with_time.left_out if line.startswith("of the time: ")]
    assert "loading the data" in of_time
    assert "clocks falling under sustained load" in of_time
    assert not [line for line in without.left_out if "of the time" in line]


def test_a_step_has_the_flops_of_its_model_and_a_share_of_the_peak() -> None:
    found = estimate("native:swin_tiny", gpu="a100-sxm-80gb", batch_size=64, accumulate=3)
    time = found.throughput
    assert time is not None
    assert time.peak_share == pytest.approx(time.matrix_flops / time.step_seconds / 312e12)
    assert 0.05 < time.peak_share < 1
    # Swin-T: 4.5 GMACs an image forward (the paper's table 1), twice as many in backward.
    assert time.matrix_flops / (64 * 3) == pytest.approx(2 * 4.5e9 * 3, rel=0.05)


# What an estimate of attention says that it leaves out, by card.


def said(
    capability: tuple[int, int] | None, *kernels: FusedAttention, precision: str = "fp16"
) -> str:
    setting = TrainSetting.model_validate({"precision": precision})
    return " ".join(left_out(setting, kernels=kernels, capability=capability))


@pytest.mark.parametrize(
    ("capability", "cudnn", "no_flash"),
    [(None, True, False), ((7, 5), False, True), ((8, 6), False, False), ((9, 0), True, False),
     ((10, 0), True, False), ((12, 0), False, False)],
)  # fmt: skip
def test_attention_is_another_kernels_on_some_cards(
    capability: tuple[int, int] | None, cudnn: bool, no_flash: bool
) -> None:
    found = said(capability, "flash")
    assert ("cuDNN's attention" in found) is cudnn
    assert ("does not run on capability 7.5" in found) is no_flash
    assert "attention" not in said(capability)
    assert "attention" not in said(capability, "efficient", precision="fp32")


# The largest batch that fits is the largest, although the allocator's bytes go up and down.


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


def test_a_step_fits_until_memory_runs_out() -> None:
    """Under torch's own CUDA code on an emulated RTX 3090 (torch 2.13.0 and 2.15.0, 2026-11-23)
    fp32 ran at 243 and ended out of memory at 244, 245, 246 and 248. At 243 it had 22.99 GiB
    reserved, as predicted."""
    card = find_gpu("rtx-3090")
    largest = largest_batch("native:swin_tiny", gpu=card, precision="fp32")
    assert largest is not None
    assert largest.setting.batch_size == 225, "without retries"
    most, more = (
        estimate("native:swin_tiny", gpu=card, precision="fp32", batch_size=batch)
        for batch in (243, 244)
    )
    assert most.fits
    assert not more.fits
    assert most.num_alloc_retries > 0
    assert most.fits_surely is False
    assert most.headroom_bytes is not None
    assert most.headroom_bytes >= 0
    assert any("freeing cached memory" in text for text in most.assumed)


def test_what_was_not_looked_at_is_said() -> None:
    model, setting = resolve(TINY, TrainSetting(attention="eager"))
    assert isinstance(model, SwinConfig)
    ended = largest_batch(model, setting, gpu="h200", ceiling=100)
    assert ended is not None
    assert ended.setting.batch_size == 100
    assert "batches above 100 are not tried" in ended.assumed[-1]
