"""Which sides of matrix products are off, worked out by hand, and what share of a step rides on
them."""

from __future__ import annotations

import pytest

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


def test_nothing_is_said_of_what_costs_nothing() -> None:
    overrides: dict[str, object]
    for model, overrides in (
        ("native:swin_tiny", {"attention": "sdpa"}),  # its kernel pads its own tiles
        ("native:swin_tiny", {"precision": "fp32"}),  # no matrix units
        ("native:swinv2_tiny", {"batch_size": 63}),  # 64 tokens; the batch is never contiguous
        ("native:swinv2_tiny", {"num_classes": 21841}),  # a thousandth of the step
    ):
        assert found(model, **overrides) == (), (model, overrides)


def test_classes_count_where_they_are_most_of_a_step() -> None:
    (side,) = found("native:swinv2_tiny", num_classes=500_001)
    assert (side.size, side.multiple) == (500_001, 8)
    assert side.padding == pytest.approx(7 / 500_001)


def test_4_numbers_of_tf32_and_16_of_8_bits_are_16_bytes() -> None:
    assert {side.size for side in found(embed_dim=100, num_heads=(5, 10, 20, 40))} == {100, 49, 20}
    tf32 = found(embed_dim=100, num_heads=(5, 10, 20, 40), precision="tf32")
    assert {side.size for side in tf32} == {49}
