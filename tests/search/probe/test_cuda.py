"""What of the CUDA path can be run without a GPU: a stand-in for the driver's library, and a
stand-in for torch.cuda. They show that the code says what it means to say, not that a GPU agrees.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.schema import FactoryModel, TrainSetting
from planner.schema.record import Clocks, Spread
from planner.units import GIB, MIB
from search.probe.nvml import NvmlMemory, NvmlProcess, NvmlUtilization
from search.probe.protocol import ProbeRequest
from search.probe.stopping import StopRule
from search.probe.worker import measure, meter
from search.probe.worker.report import Report

ASK = """
import json
from planner.environment.torch_build import TorchBuild, TorchGpu
from search.probe import device
device.torch_build = lambda: "12.8"
card = TorchGpu("Fake A", 24 * 2**30 - 2**29, (9, 0), "aaaa")
device.ask_torch = lambda *_: TorchBuild("2.13.0", cuda="13.0", available=True, gpus=(card,))
found = device.describe_device({wanted!r})
gpu = device.nvml_device(found.kind + ":0")
memory = device.memory_in_use("cuda:0")
print(json.dumps({{
    "device": found.model_dump(), "holders": len(memory.holders), "first": memory.holders[:1] and
    memory.holders[0].used_bytes, "free": memory.free_bytes, "sm": gpu.sm_mhz,
    "memory": gpu.memory_mhz, "celsius": gpu.temperature_c, "watts": gpu.power_watts,
    "reasons": gpu.throttle_reasons, "uuid": gpu.uuid,
    "busy": (gpu.utilization.gpu_percent, gpu.utilization.memory_percent)}}))
"""


@pytest.fixture(scope="module")
def ask(driver: Path) -> Callable[..., Any]:
    """Ask about a device in a process whose driver library is the stand-in."""
    folder = driver.parent

    def run(wanted: str = "auto", **environment: str) -> Any:
        answer = subprocess.run(
            [sys.executable, "-c", ASK.format(wanted=wanted)],
            env={**os.environ, "LD_LIBRARY_PATH": str(folder), **environment},
            capture_output=True,
            check=True,
        )
        return json.loads(answer.stdout)

    return run


def test_gpu_is_described_by_the_driver(ask: Callable[..., Any]) -> None:
    found = ask(CUDA_VISIBLE_DEVICES="0,1")
    assert found["device"] == {
        "kind": "cuda", "name": "Fake A", "total_bytes": 24 * GIB - GIB // 2,
        "capability": [9, 0], "driver": "999.1", "memory_cap_bytes": None,
        "uuid": "GPU-aaaa",
    }  # fmt: skip
    assert (found["holders"], found["first"], found["free"]) == (200, GIB, 20 * GIB + GIB // 2)
    assert (found["sm"], found["memory"], found["celsius"]) == (1500, 2600, 66)
    assert found["watts"] is None
    assert found["busy"] == [87, 41]
    assert found["reasons"] == ["sw_power_cap", "hw_thermal_slowdown"]


class FakeGpu:
    """What the driver says, as a test wants it."""

    def __init__(self) -> None:
        self.used, self.reserved = 2 * GIB, 0
        self.stats = {"num_alloc_retries": 5, "num_ooms": 1}
        self.processes: tuple[NvmlProcess, ...] = (NvmlProcess(1, GIB),)
        self.sm_mhz, self.sm_max_mhz, self.memory_mhz = 1500, 1980, 2600
        self.temperature_c, self.power_watts = 70, 300.0
        self.throttle_reasons: tuple[str, ...] = ("hw_thermal_slowdown", "sw_power_cap")
        self.utilization: NvmlUtilization | None = NvmlUtilization(90, 40)

    @property
    def memory(self) -> NvmlMemory:
        return NvmlMemory(24 * GIB, self.used, 24 * GIB - self.used)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """torch.cuda with a context of 500 MiB and 100 MiB in the caching allocator."""
    fake = FakeGpu()

    def make_context(*_: object, **__: object) -> None:
        fake.used += 500 * MIB

    stats = fake.stats
    stand_ins = {
        "set_device": make_context,
        "get_device_properties": lambda d: type("P", (), {"total_memory": 24 * GIB}),
        "memory_reserved": lambda d: fake.reserved,
        "memory_allocated": lambda d: 7,
        "max_memory_allocated": lambda d: 80 * MIB,
        "max_memory_reserved": lambda d: 100 * MIB,
        "memory_stats": lambda d: stats,
        "reset_peak_memory_stats": lambda d: None,
        "synchronize": lambda d: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(meter, "nvml_device", lambda device: fake)
    return fake


def test_meter_tells_memory_and_disturbances(gpu: FakeGpu) -> None:
    cuda = meter.make_meter("cuda:0")
    cuda.reset_peak()
    cuda.observe()
    gpu.used += 100 * MIB
    gpu.reserved = 100 * MIB
    gpu.stats["num_alloc_retries"] += 2
    assert cuda.memory() == meter.MemoryUse(80 * MIB, 100 * MIB, 600 * MIB)
    gpu.processes = (NvmlProcess(1, GIB), NvmlProcess(os.getpid(), 650 * MIB))
    gpu.used += 100 * MIB
    assert cuda.memory().device == 650 * MIB, "the driver knows our pid, and says more"
    gpu.throttle_reasons = ()
    cuda.observe()
    clocks = cuda.clocks()
    assert isinstance(clocks, Clocks)
    assert clocks.throttle_reasons == ("hw_thermal_slowdown", "sw_power_cap")
    assert clocks.busy_percent == Spread(least=90, median=90, most=90)
    flags = cuda.flags()
    assert flags[0] == "1 other processes on the GPU hold 2.00 GiB"
    assert flags[1] == "throttled: hw_thermal_slowdown"
    assert flags[2].startswith("2 allocations succeeded only after"), "since the peak was reset"
    assert len(flags) == 3
    assert cuda.live_bytes() == 7


def test_cap_leaves_room_for_the_context(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share)
    )
    cuda = meter.make_meter("cuda:0")
    cuda.impose_cap(12 * GIB)
    gpu.used += 300 * MIB  # kernels were loaded: the cap is not tightened for it
    cuda.impose_cap(12 * GIB)
    assert shares == [(12 * GIB - 500 * MIB) / (24 * GIB)], "imposed once"
    assert sum("emulates a device of 12.00 GiB" in flag for flag in cuda.flags()) == 1
    with pytest.raises(
        MemoryError, match=r"context takes 500\.00 MiB \(what the device's use grew"
    ):
        meter.make_meter("cuda:0").impose_cap(400 * MIB)


def test_cache_is_given_back(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = [12 * GIB]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[-1])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reserved.append(3 * GIB))
    cuda = meter.make_meter("cuda:0")
    assert cuda.release_cache() == (12 * GIB, 3 * GIB)


class CountingMeter(meter.CpuMeter):
    """A device that is two steps behind; `seconds` waits for its second mark."""

    in_flight = 2

    def __init__(self) -> None:
        self.marks = 0
        self.waited = 0
        self.furthest = 0

    def mark(self) -> float:
        self.marks += 1
        self.furthest = max(self.furthest, self.marks - 1 - self.waited)
        return float(self.marks)

    def seconds(self, start: meter.Mark, end: meter.Mark) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        self.waited = int(end) - 1
        return end - start


class Steps:
    count = 0

    def step(self, on_phase: object) -> None:
        self.count += 1


def test_steps_are_timed_back_to_back_with_two_in_flight() -> None:
    request = ProbeRequest(
        model=FactoryModel(factory="a:b"), setting=TrainSetting(), min_steps=50, max_steps=50
    )
    reading, writing = os.pipe()
    run = measure.Run(request, float("inf"), Report(writing, "p"))
    steps: Any = Steps()
    device = CountingMeter()
    samples = run._time(steps, device, run.phases, StopRule(request, float("inf"), float("inf")))
    os.close(reading)
    os.close(writing)
    assert set(samples) == {1.0}
    assert len(samples) == steps.count == 52, "those on their way when it was enough count too"
    assert device.furthest == 3, "two queued, and the one being issued"
