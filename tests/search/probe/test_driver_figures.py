"""What is believed of a driver's figures, whatever it answers: a stand-in answers as drivers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.core.units import GIB, MIB
from planner.machine import nvml
from planner.machine.hardware.overheads import CONTEXT_BYTES
from search.probe.accounting import (
    CONTEXT_GROWTH_BYTES,
    CONTEXT_HIGH_BYTES,
    CONTEXT_LOW_BYTES,
    Reading,
    measure_context,
    others_bytes,
    process_bytes,
)
from search.probe.worker import meter
from search.probe.worker.meter import Crowding
from tests.covering import covering

UNKNOWN = 2**64 - 1
figures = st.one_of(
    st.none(), st.sampled_from((0, 1, -1, -GIB, UNKNOWN, 2**63)), st.integers(-(2**40), 2**42)
)


@given(
    before=figures, used=figures, own=figures, reserved=st.integers(0, 2**41),
    peak=st.integers(0, 2**41),
)  # fmt: skip
def test_no_reading_makes_a_process_smaller_than_what_torch_knows(
    before: int | None, used: int | None, own: int | None, reserved: int, peak: int
) -> None:
    now = Reading(reserved, used, own)
    context = measure_context(before, now)
    assert CONTEXT_LOW_BYTES <= context.num_bytes <= CONTEXT_HIGH_BYTES
    assert context.source
    total = process_bytes(context, peak, before, now)
    assert total >= peak + CONTEXT_LOW_BYTES
    if own is None or own <= reserved:
        assert total <= peak + CONTEXT_HIGH_BYTES, "others' memory is not counted as ours"
    held = others_bytes(context, now)
    assert held is None or 0 <= held <= max(0, used or 0)


@pytest.mark.parametrize(
    ("before", "now", "num_bytes", "source"),
    [
        (3 * GIB, Reading(2 * MIB, 4 * GIB, 500 * MIB), 498 * MIB, "this process"),
        (3 * GIB, Reading(2 * MIB, 3 * GIB + 402 * MIB, 0), 400 * MIB, "grew by"),
        (3 * GIB, Reading(2 * MIB, 3 * GIB + 402 * MIB), 400 * MIB, "grew by"),
        (40 * GIB, Reading(2 * MIB, 3 * GIB), CONTEXT_BYTES, "assumed"),  # a neighbour has left
        (3 * GIB, Reading(2 * MIB, 40 * GIB), CONTEXT_BYTES, "assumed"),  # a neighbour has come
        (None, Reading(2 * MIB, 40 * GIB), CONTEXT_BYTES, "assumed"),
        (3 * GIB, Reading(2 * MIB, 4 * GIB, 30 * GIB), GIB - 2 * MIB, "grew by"),  # a namesake's
    ],
)
def test_the_context_is_what_is_plausible(
    before: int | None, now: Reading, num_bytes: int, source: str
) -> None:
    found = measure_context(before, now)
    assert found.num_bytes == num_bytes
    assert source in found.source


class Torch:
    """What torch.cuda says: `reserved` now and at its peak, a context of 500 MiB that the driver
    counts as `used` once it is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.say = lambda text: monkeypatch.setenv("FAKE_NVML", text)
        self.total, self.reserved, self.peak, self.free = 48 * GIB - GIB // 2, 0, 0, 44 * GIB
        self.after = ""
        stand_ins: dict[str, Any] = {
            "set_device": lambda d: self.say(self.after),
            "get_device_properties": lambda d: type("P", (), {"total_memory": self.total}),
            "memory_reserved": lambda d: self.reserved,
            "max_memory_reserved": lambda d: self.peak,
            "max_memory_allocated": lambda d: self.peak,
            "memory_stats": lambda d: {},
            "mem_get_info": lambda d: (self.free, self.total),
            "set_per_process_memory_fraction": lambda share, d: None,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
        monkeypatch.setattr(meter, "nvml_device", lambda device: nvml.device_at(1))

    def begin(self, before: str, after: str) -> meter.Meter:
        """A meter made while the driver answers `before`; its context made, it answers `after`."""
        self.after = after
        self.say(before)
        return meter.make_meter("cuda:0")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, driver: None) -> Torch:
    return Torch(monkeypatch)


OURS = 10 * GIB + 600 * MIB  # reserved, and what lies beside at the end


@pytest.mark.parametrize(
    ("word", "others"),
    covering(("right v2", "right long", "right", "zero", "na", "host", "none"), (False, True)),
)
def test_a_probe_is_told_its_size_whatever_the_driver_lists(
    fake: Torch, word: str, others: bool
) -> None:
    """10 GiB reserved of a device on which others hold 3 GiB and, in some cases, come to hold 20
    more: where the driver says less or more than is so, what torch knows counts."""
    cuda = fake.begin(f"none used={3 * GIB}", f"{word} used={3 * GIB + 500 * MIB} own={500 * MIB}")
    fake.reserved = fake.peak = 10 * GIB
    came = 20 * GIB * others
    fake.say(f"{word} used={3 * GIB + OURS + came} own={OURS}")
    device = cuda.memory().device
    # By difference 20 GiB of others are told from us: then what was measured at the start counts.
    known = word.startswith("right") or not others
    assert device == (OURS if known else 10 * GIB + 500 * MIB)
    assert cuda.crowding().free_bytes == 44 * GIB + GIB // 2
    taken = cuda.crowding().taken_bytes
    assert came - CONTEXT_GROWTH_BYTES <= taken <= came
    assert any("took" in flag for flag in cuda.flags()) == others
    assert any("other processes" in flag and "hold 3.00 GiB" in flag for flag in cuda.flags())


@pytest.mark.parametrize("word", ["", f"total={24 * GIB}"])
def test_another_total_than_torchs_is_not_believed(fake: Torch, word: str) -> None:
    """A slice of 10 GiB (MIG), or another card than the driver's numbers say."""
    fake.total, fake.free = 10 * GIB, 9 * GIB
    cuda = fake.begin(f"right {word} used={GIB} own={GIB}", f"right {word} used={GIB} own={GIB}")
    assert "NVML's figures are left aside" in cuda.flags()[0]
    fake.peak = 2 * GIB
    assert cuda.memory().device == 2 * GIB + CONTEXT_BYTES
    assert cuda.crowding().free_bytes == 9 * GIB + CONTEXT_BYTES
    cuda.observe()
    assert cuda.clocks() is None


def test_without_the_drivers_library_cuda_is_asked(
    fake: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others hold 40 GiB of 47.5: they are not our context."""
    monkeypatch.setattr(meter, "nvml_device", lambda device: None)
    fake.free = 7 * GIB
    cuda = meter.make_meter("cuda:0")
    fake.peak = fake.reserved = GIB
    cuda.impose_cap(6 * GIB)
    fake.free = 2 * GIB
    assert cuda.memory().device == GIB + CONTEXT_BYTES
    assert cuda.crowding() == Crowding(7 * GIB + CONTEXT_BYTES, 4 * GIB)


def test_what_disturbed_it_is_told_and_a_cap_leaves_room_for_the_context(
    fake: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats, shares = {"num_alloc_retries": 5, "num_ooms": 1}, list[float]()
    for name, stand_in in {
        "memory_stats": lambda d: stats,
        "reset_peak_memory_stats": lambda d: None,
        "set_per_process_memory_fraction": lambda share, d: shares.append(share),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    ours = f"right used={3 * GIB + 500 * MIB} own={500 * MIB}"
    cuda = fake.begin(f"none used={3 * GIB}", ours)
    cuda.reset_peak()
    cuda.observe()
    stats["num_alloc_retries"] += 2
    told = cuda.flags()
    assert "throttled: hw_thermal_slowdown" in told
    assert any(flag.startswith("2 allocations succeeded only after") for flag in told)
    cuda.impose_cap(12 * GIB)
    fake.say(f"right used={3 * GIB + 800 * MIB} own={800 * MIB}")  # kernels were loaded
    cuda.impose_cap(12 * GIB)
    assert shares == [(12 * GIB - 500 * MIB) / fake.total], "imposed once"
    assert sum("emulates a device of 12.00 GiB" in flag for flag in cuda.flags()) == 1
    with pytest.raises(MemoryError, match=r"context takes 500\.00 MiB \(the driver"):
        fake.begin(f"none used={3 * GIB}", ours).impose_cap(400 * MIB)
