"""What is believed of a driver's figures, whatever it answers: a stand-in answers as drivers do."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.units import GIB, MIB
from planner.machine import nvml
from planner.machine.doctor import Card, Facts, read_cards
from planner.machine.emulated import EmulatedMachine, holding, started
from planner.machine.findings import judge
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
from tests.emulated.conftest import RTX_3090, answer, libraries  # noqa: F401
from tests.environment.recorded import recorded

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


@pytest.mark.parametrize(
    ("word", "own"),
    [
        ("right v2", [GIB]), ("right long", [GIB]), ("right", [GIB]), ("zero", [0]), ("na", [None]),
        ("host", []), ("none", []),
    ],
)  # fmt: skip
def test_processes_are_read_as_each_driver_lists_them(
    word: str, own: list[int | None], monkeypatch: pytest.MonkeyPatch, driver: None
) -> None:
    monkeypatch.setenv("FAKE_NVML", f"{word} used={4 * GIB} own={GIB}")
    card = nvml.device_at(1)
    assert card.memory.used == 4 * GIB
    assert [p.used_bytes for p in card.processes if p.pid == os.getpid()] == own


METER = """
import json, subprocess, sys, torch
from search.probe.worker.meter import make_meter
HOLD = "import torch; x = torch.empty(2 << 30, dtype=torch.uint8, device='cuda'); input(print())"
cuda = make_meter("cuda:0")
try:
    cuda.impose_cap(1 << 20)
except MemoryError as error:
    refused = str(error)
cuda.impose_cap(6 << 30)
held = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.empty_cache()
try:
    torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
with subprocess.Popen([sys.executable, "-uc", HOLD], stdin=-1, stdout=-1) as other:
    other.stdout.readline()
    cuda.observe()
    hot = {"throttle_reasons": ("hw_thermal_slowdown",)}
    cuda.readings[:] = [{**reading, **hot} for reading in cuda.readings]
    found = [cuda.memory().device, *vars(cuda.crowding()).values(), cuda.flags(), refused]
    other.kill()
print(json.dumps(found))
"""


HAS_NVML = EmulatedMachine((RTX_3090,))


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("machine", "doubt"),
    [
        (HAS_NVML, "throttled: hw_thermal_slowdown"),
        (replace(HAS_NVML, hides_processes=True), "throttled: hw_thermal_slowdown"),
        (replace(HAS_NVML, nvml_used_error=100 * MIB), "hold 3.54 GiB"),
        (replace(HAS_NVML, has_nvml=False), "took 2.44 GiB of the GPU"),
    ],
)
@pytest.mark.usefixtures("libraries")
def test_a_probe_is_told_its_size_whatever_the_driver_lists(
    machine: EmulatedMachine, doubt: str
) -> None:
    """4 GiB and a first tensor's segment on a device on which others hold 3 GiB, and then come to
    hold 2 more."""
    with started(machine) as environment, holding(environment, 3 * GIB):
        device, free, taken, flags, refused = answer(environment, METER)
    assert device == 4 * GIB + 2 * MIB + CONTEXT_BYTES
    total = RTX_3090.memory_bytes - machine.nvml_used_error
    assert free == total - 3 * GIB - CONTEXT_BYTES
    came = 2 * GIB + CONTEXT_BYTES
    assert came - CONTEXT_GROWTH_BYTES <= taken <= came
    told = " ".join(flags)
    assert doubt in told
    assert "1 allocations succeeded only after" in told
    assert told.count("emulates a device of 6.00 GiB") == 1
    assert refused.startswith("the CUDA context takes 454.90 MiB (")


# What the doctor reads.


def read(monkeypatch: pytest.MonkeyPatch, words: str) -> tuple[Card, ...]:
    monkeypatch.setenv("FAKE_NVML", words)
    return read_cards()


def names(cards: tuple[Card, ...]) -> list[str]:
    facts: Facts = replace(recorded("h200"), cards=cards)
    return sorted({finding.name for finding in judge(facts)})


@pytest.mark.usefixtures("driver")
def test_a_card_that_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = read(monkeypatch, "none used=0")
    assert (first.recovery, first.ecc_errors, first.no_p2p) == ("", 0, {})
    assert (first.instances, read(monkeypatch, "mig")[0].instances) == (None, 2)
    assert (first.lanes, first.max_lanes, second.nvlinks_up, second.nvlinks_down) == (8, 16, 4, 0)
    assert (first.watts, first.default_watts, first.sm_mhz) == (500, 700, 1500)
    assert first.reasons == ("sw_power_cap", "hw_thermal_slowdown")
    assert names((first, second)) == ["card.power-limit", "card.throttled", "link.pcie"]


@pytest.mark.usefixtures("driver")
def test_a_card_that_is_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = read(monkeypatch, "sick right used=6442450944")
    assert (first.recovery, first.ecc_errors) == ("a reset", 3)
    assert (first.reset_pending, first.remap_failed, first.nvlinks_down) == (True, True, 1)
    assert first.no_p2p == {1: "the chipset does not support it"}
    assert len(first.holders) == 2
    found = {"card.reset", "card.busy", "link.no-p2p", "link.nvlink-down"}
    assert found <= set(names((first, second)))


@pytest.mark.usefixtures("driver")
def test_a_card_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (card,) = read(monkeypatch, "lost")
    assert card.gpu.name == "Fake A"
    assert nvml.why_silent() == "GPU 1: GPU is lost"
    monkeypatch.setenv("FAKE_NVML", "")
    assert nvml.why_silent() == ""
