"""Which sides of matrix products are off, worked out by hand, and what share of a step rides on
them."""

from __future__ import annotations

import pytest

from planner import estimate
from planner.core.schema import SwinConfig
from planner.estimation.estimate import choose
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import RECORDED_MICRO_BATCHES
from planner.machine.hardware import find_gpu
from planner.throughput.alignment import Misaligned, misaligned
from planner.throughput.prediction import predict_step, rates_for

A100 = find_gpu("a100-sxm-80gb")


def found(model: str = "native:swin_tiny", **overrides: object) -> tuple[Misaligned, ...]:
    fields = {"batch_size": 64, "attention": "eager", **overrides}
    config, setting = choose(model, None, A100, fields)
    assert isinstance(config, SwinConfig)
    operations = list(step_ledger(config, setting).operations())
    rates = rates_for(A100)
    recorded = min(setting.accumulate, RECORDED_MICRO_BATCHES)
    time = predict_step(operations, rates, setting, recorded)
    return misaligned(config, setting, operations, rates, time)


def test_49_tokens_are_off_8_and_padding_them_to_56_costs_31_percent() -> None:
    (side,) = found()
    assert (side.size, side.multiple) == (49, 8)
    assert side.padding == pytest.approx((56 / 49) ** 2 - 1)
    assert 0.01 < side.step_share < 0.2


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("native:swinv2_tiny", {}),  # 64 tokens
        ("native:swin_tiny", {"attention": "sdpa"}),  # its kernel pads its own tiles
        ("native:swin_tiny", {"precision": "fp32"}),  # no matrix units
        ("native:swinv2_tiny", {"batch_size": 63}),  # the batch is never contiguous
        ("native:swinv2_tiny", {"num_classes": 21841}),  # a thousandth of the step
    ],
)
def test_nothing_is_said_of_what_costs_nothing(model: str, overrides: dict[str, object]) -> None:
    assert found(model, **overrides) == ()


def test_classes_count_where_they_are_most_of_a_step() -> None:
    (side,) = found("native:swinv2_tiny", num_classes=500_001)
    assert (side.size, side.multiple) == (500_001, 8)
    assert side.padding == pytest.approx(7 / 500_001)


def test_4_numbers_of_tf32_and_16_of_8_bits_are_16_bytes() -> None:
    assert {side.size for side in found(embed_dim=100, num_heads=(5, 10, 20, 40))} == {100, 49, 20}
    tf32 = found(embed_dim=100, num_heads=(5, 10, 20, 40), precision="tf32")
    assert {side.size for side in tf32} == {49}


def test_the_share_does_not_depend_on_how_many_micro_batches_are_recorded() -> None:
    (one,), (many,) = found(), found(accumulate=8)
    # The optimizer's step, once for eight micro-batches, is all that differs.
    assert one.step_share <= many.step_share < 1.1 * one.step_share


def test_an_estimate_says_it_under_what_its_time_leaves_out() -> None:
    of_a100 = estimate("native:swin_tiny", gpu=A100, attention="eager")
    assert any("49 tokens, no multiple of 8" in text for text in of_a100.left_out)
    assert not any("tokens" in text for text in estimate("native:swin_tiny").left_out)
