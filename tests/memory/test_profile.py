"""One walk over a ledger, by hand: what is alive when, and what the allocator is asked."""

from __future__ import annotations

from planner.ledger.ledger import Allocated, Computed, Event, Freed, Ledger, Marked, Tagged
from planner.memory.profile import (
    alive_at,
    growth_within,
    instant,
    steady_step,
)

MIB = 1024**2
PRODUCT = Computed("aten.mm", "matmul", "float32", 1, 1, 1, "head")


def step(number: int) -> list[Event]:
    """Saves 1,000 B of activations, works in 2,000 B, and leaves a gradient of 512 B that the next
    step frees."""
    first = 10 * number
    return [
        Allocated(first + 1, 1000, "aten.mm", "head"), Tagged(first + 1, "activations"), PRODUCT,
        Marked("forward", number),
        PRODUCT, Allocated(first + 2, 2000, "aten.add"), PRODUCT, Freed(first + 1),
        Allocated(first + 3, 512, "aten.mm"), Tagged(first + 3, "gradients"), Freed(first + 2),
        Marked("backward", number),
        Marked("optimizer", number),
        Freed(first + 3),
        Marked("zero_grad", number),
    ]  # fmt: skip


EVENTS = [Allocated(99, 100, "weight"), Tagged(99, "parameters"), Marked("build", 0)]
LEDGER = Ledger((*EVENTS, *step(0), *step(1)), batch_size=2, num_parameters=25)
SECOND = len(EVENTS) + len(step(0))  # the second step's first event


def test_a_steady_step_is_the_last_one() -> None:
    found = steady_step(LEDGER)
    assert found.before_step == 512
    assert found.saved_bytes == 1024
    assert found.ends == (
        ("forward", 1536), ("backward", 1024), ("optimizer", 1024), ("zero_grad", 512),
    )  # fmt: skip
    assert (found.peak_bytes, found.peak_index) == (3584, SECOND + 5)
    assert found.steady_from == SECOND - 1


def test_a_phase_needs_what_live_bytes_rise_within_it() -> None:
    assert growth_within(LEDGER, "forward") == 1024
    assert growth_within(LEDGER, "backward") == 2048
    assert growth_within(LEDGER, "optimizer") == 0
    assert growth_within(LEDGER, "build") == 512


def test_an_instant_names_what_is_alive() -> None:
    found = instant(LEDGER, SECOND + 5)
    assert (found.phase, found.micro_batch, found.label) == ("backward", 1, "aten.add")
    assert found.by_category == {"parameters": 512, "activations": 1024, "temporaries": 2048}
    assert found.live_bytes == 3584
    assert found.largest == (("", "aten.add", 2000), ("head", "aten.mm", 1000))
    # A tag right behind an allocation says what was just allocated.
    assert alive_at(LEDGER, SECOND)[-1] == (1000, "activations", "head", "aten.mm")
