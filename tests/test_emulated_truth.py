"""Every estimate is held to what torch's own CUDA code allocated on emulated GPUs.

The records of tests/truth/emulated/ were made once (tests/truth/README.md); nothing here
needs a GPU, an emulated one or torch's CUDA build. The default run looks at one step in
thirteen, CI at all. truth/TABLES.md shows the same tables.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from planner.machine.hardware.overheads import CONTEXT_BYTES_LOW, overheads_for
from tests.truth.compare import Comparison, gpu_of
from tests.truth.emulated_steps import (
    kind_of,
    read_emulated,
    read_peaks,
    show_kinds,
    show_peaks,
)

PAGE = Path(__file__).parent / "truth/TABLES.md"


# Held to the byte; what other versions that are tried allocate is measured, and within the range.
EXACT = ("2.13", "2.15")
ONE_IN = 13
shares = pytest.mark.parametrize("one_in", [ONE_IN, pytest.param(1, marks=pytest.mark.truth)])


def errors(one_in: int, quantity: str, *kinds: str, others: bool = False) -> list[float]:
    """Of emulated steps of some kinds, signed shares; of the torches in `EXACT` or of others."""
    found = [
        c.error(quantity)
        for c in read_emulated(one_in)
        if kind_of(c.record).startswith(kinds)
        and c.record.versions["torch"].startswith(EXACT) != others
    ]
    return [error for error in found if error is not None]


@shares
def test_eager_steps_equal_torchs_own_cuda_code(one_in: int) -> None:
    """Allocated, 241 of 242 to the byte; reserved, 237. The worst reserves 1.9% less than its
    replay, which asks for the same bytes in the same order: blocks of one size may be taken in
    another order of addresses."""
    allocated, reserved = errors(one_in, "allocated", "eager"), errors(one_in, "reserved", "eager")
    assert sum(error == 0 for error in allocated) >= 0.99 * len(allocated)
    assert sum(error == 0 for error in reserved) >= 0.97 * len(reserved)
    assert max(map(abs, allocated)) <= 0.001
    assert sorted(map(abs, reserved))[-2] <= 0.01
    assert max(map(abs, reserved)) <= 0.02


@shares
def test_other_versions_of_torch_are_within_one_percent(one_in: int) -> None:
    """So no law is written for them."""
    assert max(map(abs, errors(one_in, "allocated", "eager", others=True))) <= 0.002
    assert max(map(abs, errors(one_in, "reserved", "eager", others=True))) <= 0.01


@shares
def test_each_rank_of_fsdp_is_within_half_a_percent(one_in: int) -> None:
    found = errors(one_in, "allocated", "fsdp") + errors(one_in, "reserved", "fsdp")
    assert max(map(abs, found)) <= 0.005


@shares
def test_ddp_is_off_by_when_its_first_buckets_go(one_in: int) -> None:
    """NCCL's thread gives them up about every 100 ms: whether old and new ones lie side by side at
    a peak depends on how long a step takes (docs/many-gpus.md)."""
    assert max(map(abs, errors(one_in, "allocated", "ddp"))) <= 0.005
    assert median(map(abs, errors(one_in, "reserved", "ddp"))) <= 0.006
    assert max(map(abs, errors(one_in, "reserved", "ddp"))) <= 0.01


@shares
def test_the_stated_range_holds_for_every_step(one_in: int) -> None:
    def holds(c: Comparison) -> bool:
        taken = c.record.device_bytes
        # An emulated card's context is as it was assumed when the step was recorded.
        since = overheads_for(gpu_of(c.record)).context_low_bytes - CONTEXT_BYTES_LOW
        return taken is None or c.estimate.low_bytes - since <= taken <= c.estimate.high_bytes

    assert [c.record.probe_id for c in read_emulated(one_in) if not holds(c)] == []


def test_the_emulated_device_allocates_what_real_gpus_did() -> None:
    counted = [abs(p.error) for p in read_peaks() if not p.explained]
    assert len(counted) >= 40
    assert median(counted) <= 0.0005
    assert max(counted) <= 0.003


@pytest.mark.parametrize(
    ("mark", "table"),
    [
        pytest.param(
            "tests.truth.emulated_steps",
            lambda: show_kinds(read_emulated(1)),
            marks=pytest.mark.truth,
        ),
        ("tests.truth.emulated_steps --real", lambda: show_peaks(read_peaks())),
    ],
)
def test_the_docs_show_what_the_command_prints(mark: str, table: Callable[[], str]) -> None:
    shown = PAGE.read_text(encoding="utf-8")
    shown = shown.split(f"<!-- python -m {mark} -->\n```\n")[1].split("\n```\n")[0]
    assert shown.strip() == table().strip()
