"""The bytes alive over a step, on a ledger small enough to follow."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.report.step import step_live_bytes
from tests.report.ledgers import layered_ledger

MIB = 1024**2


def test_the_steady_step_is_walked() -> None:
    live = step_live_bytes(layered_ledger())
    # Weights 4 × 8 and state 4 × 16 are held from the first step on; 4 × 100 are saved and the last
    # layer's 30 of scratch come on top: 526 MiB, first in the forward of layer 3.
    assert live.total[0] == 96 * MIB
    assert live.peak_bytes == 526 * MIB
    at_peak = {c: points[live.peak] // MIB for c, points in live.by_category.items()}
    assert at_peak == {
        "parameters": 32, "buffers": 0, "gradients": 0, "optimizer_state": 64, "activations": 400,
        "temporaries": 30,
    }  # fmt: skip
    assert [p.name for p in live.phases] == ["forward", "backward", "optimizer", "zero_grad"]
    assert live.total[live.phases[2].start - 1] == (96 + 32) * MIB  # gradients after backward
    assert live.total[-1] == 96 * MIB


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3))
def test_categories_add_up(num_layers: int, num_micro_batches: int) -> None:
    live = step_live_bytes(layered_ledger(num_layers, num_micro_batches))
    for point, total in enumerate(live.total):
        assert total == sum(points[point] for points in live.by_category.values())
    assert [p.start for p in live.phases[1:]] == [p.stop for p in live.phases[:-1]]
    assert live.phases[-1].stop == len(live.total)
