"""Which card "cuda:0" is and whether torch can use it, by a stand-in for the driver's library and
one for what torch answers; and its rates: measured apart, once, and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planner.core.errors import UsageError
from planner.core.schema import DeviceInfo, TrainSetting
from planner.core.units import GIB
from planner.machine.torch_build import TorchBuild, TorchGpu
from search.loop import folder
from search.loop.memory_budget import find_budget
from search.loop.options import SearchOptions
from search.probe import device
from search.probe.device import MemoryInUse

A = TorchGpu("Fake A", 24 * GIB - GIB // 2, (9, 0), "aaaa")
B = TorchGpu("Fake B", 48 * GIB - GIB // 2, (9, 1), "bbbb")
SLICE = TorchGpu("Fake B MIG 1g.10gb", 10 * GIB, (9, 1), "MIG-cccc")

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, driver: None) -> Iterator[Machine]:
    """A machine with the two cards of the stand-in library and a torch that has these GPUs."""
    monkeypatch.setattr(device, "installed_build", lambda: "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def forget() -> None:
        for cached in (device._nvml_gpus, device._ask_torch, device._describe_cuda):
            cached.cache_clear()

    def be(*gpus: TorchGpu, says: str = "", **build: object) -> None:
        given = {"version": "2.13.0+cu130", "cuda": "13.0", "available": True, **build}
        told = TorchBuild(**given, gpus=gpus)  # type: ignore[arg-type]
        monkeypatch.setattr(device, "ask_torch", lambda environ, tried: told)
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
    holders = device.memory_in_use("cuda:0").holders
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
            return [stack.enter_context(folder.hold_gpu(uuid)) for uuid in uuids]

    monkeypatch.setattr(folder.tempfile, "gettempdir", lambda: str(tmp_path / "in"))
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
