"""Which card "cuda:0" is and whether torch can use it, by a stand-in for the driver's library and
one for what torch answers; and what is believed of a driver's figures."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.errors import UsageError
from planner.core.schema import DeviceInfo, TrainSetting
from planner.core.units import GIB, MIB
from planner.machine import nvml
from planner.machine.doctor import Card, MachineFacts, read_cards
from planner.machine.emulated import EmulatedMachine, holding, started
from planner.machine.findings import judge
from planner.machine.hardware.overheads import CONTEXT_BYTES
from planner.machine.torch_build import TorchBuild, TorchGpu
from search.loop import records
from search.loop.options import SearchOptions
from search.probe import device
from search.probe.device import (
    CONTEXT_GROWTH_BYTES,
    CONTEXT_HIGH_BYTES,
    CONTEXT_LOW_BYTES,
    MemoryInUse,
    Reading,
    measure_context,
    others_bytes,
    process_bytes,
)
from search.tuning.tune import find_budget
from tests.emulated.conftest import RTX_3090, answer, libraries  # noqa: F401
from tests.environment.recorded import recorded

A = TorchGpu("Fake A", 24 * GIB - GIB // 2, (9, 0), "aaaa")
B = TorchGpu("Fake B", 48 * GIB - GIB // 2, (9, 1), "bbbb")
SLICE = TorchGpu("Fake B MIG 1g.10gb", 10 * GIB, (9, 1), "MIG-cccc")

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, driver: None) -> Iterator[Machine]:
    """A machine with the two cards of the stand-in library and a torch that has these GPUs."""
    monkeypatch.setattr(device.torch_build, "installed_build", lambda: "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def forget() -> None:
        for cached in (device._nvml_gpus, device._ask_torch, device._describe_cuda):
            cached.cache_clear()

    def be(*gpus: TorchGpu, says: str = "", **build: object) -> None:
        given = {"version": "2.13.0+cu130", "cuda": "13.0", "available": True, **build}
        told = TorchBuild(**given, gpus=gpus)  # type: ignore[arg-type]
        monkeypatch.setattr(device.torch_build, "ask_torch", lambda environ, tried: told)
        monkeypatch.setenv("FAKE_NVML", says)
        forget()

    yield be
    forget()


def test_a_card_is_named_by_the_driver_and_sized_by_torch(machine: Machine) -> None:
    machine(A, B)
    assert device.describe_device("cuda:1") == DeviceInfo(
        kind="cuda", name="Fake B", total_bytes=B.total_bytes, capability=(9, 1), driver="999.1",
        uuid="GPU-bbbb",
    )  # fmt: skip
    memory = device.memory_in_use("cuda:1")
    assert memory == MemoryInUse(B.total_bytes, 3 * GIB, 44 * GIB + GIB // 2)
    holders = device.nvml_device("cuda:0").processes
    assert (len(holders), holders[0].used_bytes) == (200, GIB)
    first = device.nvml_device("cuda:0")
    assert (first.sm_mhz, first.memory_mhz, first.temperature_c) == (1500, 2600, 66)
    assert first.power_watts is None


def test_visible_devices_renumber(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(B, A)  # CUDA_DEVICE_ORDER=FASTEST_FIRST: torch's cuda:0 is the driver's second
    assert device.memory_in_use("cuda:0").total_bytes == B.total_bytes
    for visible in ("1", "1,0", "GPU-b", "GPU-bbbb"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        machine(B)
        assert device.describe_device("cuda:0").uuid == "GPU-bbbb", visible
        assert device.nvml_device("cuda:0").name == "Fake B", visible
    assert device.name_card("cuda:0") is None, "one visible card needs no name"


def test_a_slice_is_not_the_card(machine: Machine) -> None:
    machine(SLICE, says="mig")
    found = device.describe_device("cuda:0")
    assert (found.name, found.total_bytes) == ("Fake B MIG 1g.10gb", 10 * GIB)
    assert device.memory_in_use("cuda:0") is None
    assert device.nvml_device("cuda:0") is None
    machine(TorchGpu("Fake A", 10 * GIB, (9, 0)))
    assert device.describe_device("cuda:0").total_bytes == 10 * GIB
    assert device.memory_in_use("cuda:0") is None


@pytest.mark.parametrize(
    ("build", "gpu", "reason"),
    [
        ({"available": False, "reason": "The NVIDIA driver on your system is too old"}, None,
         "too old"),
        ({"arch_list": ("sm_75", "sm_80", "sm_90")}, TorchGpu("V100", 16 * GIB, (7, 0)),
         "no code for V100 of compute capability 7.0"),
        ({}, TorchGpu("Card", 16 * GIB, (9, 0), error="CUDA error: unknown error"), "unknown"),
        ({}, None, "torch sees 0 GPUs"),
    ],
)  # fmt: skip
def test_auto_is_the_cpu_where_torch_cannot_use_the_gpu_and_says_why(
    machine: Machine, build: dict[str, object], gpu: TorchGpu | None, reason: str
) -> None:
    """The driver answers in all of them."""
    machine(*([gpu] if gpu else []), **build)
    assert device.choose_device("auto") == "cpu"
    assert reason in (device.why_no_gpu() or "")
    with pytest.raises(UsageError, match="cannot be used"):
        device.describe_device("cuda:0")


def test_a_second_tuner_on_a_card_knows_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no uuid that names a path of its own; where no file can be made nobody is suspected."""

    def held(*uuids: str) -> list[bool]:
        with contextlib.ExitStack() as stack:
            return [stack.enter_context(records.hold_gpu(uuid)) for uuid in uuids]

    monkeypatch.setattr(records.tempfile, "gettempdir", lambda: str(tmp_path / "in"))
    assert held("GPU-a", "GPU-a") == [True, True]
    (tmp_path / "in").mkdir()
    assert held("GPU-a", "GPU-a", "GPU-b") == [True, False, True]
    assert held("GPU-a", "../../etc/x", "GPU-" + "x" * 500, "a\0b") == [True] * 4
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_world_needs_a_gpu_for_each_rank(machine: Machine) -> None:
    machine(A, B)
    two = TrainSetting(world_size=2, parallelism="ddp")
    device.check_world("cuda:0", two)
    device.check_world("cuda:0", TrainSetting(world_size=8))  # one device stands for each
    device.check_world("cpu", two.model_copy(update={"world_size": 8, "nodes": 2}))
    with pytest.raises(UsageError, match="2 GPUs were asked for from cuda:1 on"):
        device.check_world("cuda:1", two)
    with pytest.raises(UsageError, match="3 GPUs") as caught:
        device.check_world("cuda:0", two.model_copy(update={"world_size": 3}))
    assert "--device cpu" in str(caught.value)
    with pytest.raises(UsageError, match="of this machine"):
        device.check_world("cuda:0", two.model_copy(update={"nodes": 2}))


def test_ranks_on_the_cpu_share_its_memory() -> None:
    host = DeviceInfo(kind="cpu", name="Test CPU", total_bytes=8 * GIB)
    in_use = MemoryInUse(8 * GIB, 0, 8 * GIB)
    budget = find_budget(host, in_use, SearchOptions(headroom=0.0), ranks=4)
    assert (budget.budget_bytes, budget.cap_bytes) == (2 * GIB, 2 * GIB)
    assert any("4 ranks share" in note for note in budget.notes)
    larger = find_budget(host, in_use, SearchOptions(headroom=0.0, memory_bytes=9 * GIB))
    assert "--memory 9.00 GiB caps nothing: this device has 8.00 GiB." in larger.notes


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
    facts: MachineFacts = replace(recorded("h200"), cards=cards)
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
