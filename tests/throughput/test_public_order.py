"""The time model ranks what others timed as they did, on each card: tests/truth/public.jsonl.

How far each rate is off is held by tests/test_published.py.
"""

from __future__ import annotations

from functools import cache
from itertools import permutations

import pytest

from tests.libraries.steps import needs
from tests.truth.published import PublishedRow, predicted_rate, read_published

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
    found = predicted_rate(rows()[row_id])
    assert found is not None
    return found


def measured(row: PublishedRow) -> float:
    assert row.images_per_second is not None
    return row.images_per_second


@needs("timm")
@pytest.mark.parametrize("card", CARDS)
def test_what_is_faster_by_a_tenth_is_predicted_to_be_faster(card: str) -> None:
    timed = [r for r in rows().values() if r.gpu == card and r.why_time_is_only_listed is None]
    pairs = [(a, b) for a, b in permutations(timed, 2) if a.span == b.span]
    faster = [(a.id, b.id) for a, b in pairs if measured(a) > APART * measured(b)]
    assert len(faster) > 10
    wrong = [(a, b) for a, b in faster if predicted(a) <= predicted(b)]
    assert not wrong


@needs("timm")
def test_what_16_bits_gain_on_an_a100_is_predicted() -> None:
    """Swin-T 2.70, Swin-S 3.06, Swin-B 3.69 times fp32, forward and backward, at batch 128."""
    for size in ("tiny", "small", "base"):
        half, full = (f"vmamba-{size}-{p}-forward-backward" for p in ("fp16", "fp32"))
        gained = measured(rows()[half]) / measured(rows()[full])
        assert predicted(half) / predicted(full) == pytest.approx(gained, rel=0.1)
