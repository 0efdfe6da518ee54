"""One walk over a ledger, by hand: what is alive when, and what the allocator is asked."""

from __future__ import annotations

from planner.core.torch_version import as_of
from planner.ledger.ledger import Allocated, Computed, Event, Freed, Ledger, Marked, Tagged
from planner.memory.profile import (
    find_alive,
    growth_within,
    instant,
    profile_memory,
    steady_requests,
    steady_step,
    walk_ledger,
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


@as_of("2.14")
def test_the_first_products_of_forward_and_backward_ask_for_a_workspace() -> None:
    walked, requests, steady_from = steady_requests(LEDGER, 8 * MIB)
    assert requests[:6] == [100, 1000, 8 * MIB, 8 * MIB, 2000, ~1]
    assert walked.requests_with(0) == walked.requests
    assert [LEDGER.events[i] for i in walked.events[2:4]] == [PRODUCT, PRODUCT]
    assert steady_from == 9
    with_workspace = profile_memory(LEDGER, 8 * MIB, None)
    without = profile_memory(LEDGER, 0, None)
    assert with_workspace.peak_allocated_bytes - without.peak_allocated_bytes == 16 * MIB
    assert with_workspace.live == without.live


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
    alive = find_alive(LEDGER.events, SECOND)
    assert alive[-1] == (LEDGER.events[SECOND], "activations")


@as_of("2.14")
def test_a_walk_carries_the_streams_of_requests() -> None:
    def gathered(number: int) -> list[Event]:
        """A gather of 30 MiB beside the product, freed once its parts are copied out."""
        first = 10 * number
        return [
            Allocated(first + 1, 30 * MIB, "all_gather", stream="all_gather"), PRODUCT,
            Allocated(first + 2, 20 * MIB, "copy_out"), Freed(first + 1), Freed(first + 2),
            Marked("forward", number), Marked("backward", number), Marked("optimizer", number),
            Marked("zero_grad", number),
        ]  # fmt: skip

    events = (*EVENTS, *gathered(0), *gathered(1))
    walked = walk_ledger(Ledger(events, batch_size=2, num_parameters=25))
    assert walked.stream_names == ("", "all_gather")
    # The weights; the gather, the product's workspace, the copy, and both released.
    assert walked.streams[:6] == [0, 1, 0, 0, 1, 0]
    found = profile_memory(Ledger(events, batch_size=2, num_parameters=25), 8 * MIB, None)
    # On one stream, the copies would take what the gathers freed.
    assert found.reserved_by_stream == {"": (2 + 20 + 20) * MIB, "all_gather": 30 * MIB}
    assert found.peak_reserved_bytes == 72 * MIB
