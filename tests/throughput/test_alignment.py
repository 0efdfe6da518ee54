"""Which sides of matrix products are off, worked out by hand, and what share of a step rides on
them."""

from __future__ import annotations

from functools import cache
from itertools import permutations

import pytest

from planner.estimation.estimate import choose
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import RECORDED_MICRO_BATCHES
from planner.machine.hardware import find_gpu
from planner.throughput.alignment import Misaligned, misaligned
from planner.throughput.prediction import predict_step, rates_for
from tests.libraries.steps import needs
from tests.truth.published import PublishedRow, predicted_rate, read_published

A100 = find_gpu("a100-sxm-80gb")


def found(model: str = "native:swin_tiny", **overrides: object) -> tuple[Misaligned, ...]:
    fields = {"batch_size": 64, "attention": "eager", **overrides}
    config, setting = choose(model, None, A100, fields)
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


# The time model ranks what others timed as they did, on each card: tests/truth/public.jsonl.
#
# How far each rate is off is held by tests/test_published.py.

CARDS = (
    *(pytest.param(card, marks=pytest.mark.truth) for card in ("a100-sxm-80gb", "rtx-3090")),
    "rtx-4090", "rtx-5090",
)  # fmt: skip
# Rates closer than this to each other are not ranked: a run differs from its repeat by as much.
APART = 1.1


@cache
def rows() -> dict[str, PublishedRow]:
    return {row.id: row for row in read_published() if not row.is_traced}


@cache
def predicted(row_id: str) -> float:
    return predicted_rate(rows()[row_id])


@needs("timm")
@pytest.mark.parametrize("card", CARDS)
def test_what_is_faster_by_a_tenth_is_predicted_to_be_faster(card: str) -> None:
    timed = [r for r in rows().values() if r.gpu == card and r.why_time_is_only_listed is None]
    pairs = [(a, b) for a, b in permutations(timed, 2) if a.span == b.span]
    faster = [(a.id, b.id) for a, b in pairs if a.images_per_second > APART * b.images_per_second]
    assert len(faster) > 10
    wrong = [(a, b) for a, b in faster if predicted(a) <= predicted(b)]
    assert not wrong


@needs("timm")
def test_what_16_bits_gain_on_an_a100_is_predicted() -> None:
    """Swin-T 2.70, Swin-S 3.06, Swin-B 3.69 times fp32, forward and backward, at batch 128."""
    for size in ("tiny", "small", "base"):
        half, full = (f"vmamba-{size}-{p}-forward-backward" for p in ("fp16", "fp32"))
        gained = rows()[half].images_per_second / rows()[full].images_per_second
        assert predicted(half) / predicted(full) == pytest.approx(gained, rel=0.1)
