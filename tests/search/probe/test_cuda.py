"""What of the CUDA path can be run without a GPU: a stand-in for the driver's library, and a
stand-in for torch.cuda. They show that the code says what it means to say, not that a GPU agrees.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from planner.core.schema import FactoryModel, TrainSetting
from planner.core.schema.record import Clocks, Spread
from planner.core.units import GIB, MIB
from planner.machine.nvml import NvmlMemory, NvmlProcess, NvmlUtilization
from search.probe.protocol import ProbeRequest
from search.probe.stopping import StopRule
from search.probe.worker import measure, meter
from search.probe.worker.clocks import ClockReading, sum_up
from search.probe.worker.report import Report


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
    assert clocks.throttle_reasons == ("hw_thermal_slowdown", "sw_power_cap")
    assert clocks.busy_percent == Spread(least=90, median=90, most=90)
    flags = cuda.flags()
    assert flags[0] == "other processes on the GPU hold 2.00 GiB"
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
        self.waited = int(end) - 1
        return end - start


class Steps:
    count = 0

    def step(self, on_phase: object) -> None:
        self.count += 1


def test_steps_are_timed_back_to_back_with_two_in_flight(report: Report) -> None:
    request = ProbeRequest(
        model=FactoryModel(factory="a:b"), setting=TrainSetting(), min_steps=50, max_steps=50
    )
    run = measure.Run(request, float("inf"), report)
    steps: Any = Steps()
    device = CountingMeter()
    samples = run._time(steps, device, run.phases, StopRule(request, float("inf"), float("inf")))
    assert set(samples) == {1.0}
    assert len(samples) == steps.count == 52, "those on their way when it was enough count too"
    assert device.furthest == 3, "two queued, and the one being issued"


READING = ClockReading(1500, 1980, 2600, 70, 300.0, NvmlUtilization(90, 40), ("sw_power_cap",))


def test_spreads_are_over_all_readings_and_plain_figures_of_the_last() -> None:
    readings = [
        replace(READING, sm_mhz=1980, power_watts=100.0, utilization=NvmlUtilization(20, 5)),
        replace(READING, throttle_reasons=("hw_slowdown",)),
        replace(READING, sm_mhz=1400, utilization=None),
    ]
    found = sum_up(readings)
    assert (found.sm_mhz, found.num_readings) == (1400, 3)
    assert found.sm_mhz_spread == Spread(least=1400, median=1500, most=1980)
    assert found.power_watts_spread == Spread(least=100, median=300, most=300)
    assert found.busy_percent == Spread(least=20, median=55, most=90)
    assert found.memory_busy_percent == Spread(least=5, median=22.5, most=40)
    assert found.throttle_reasons == ("hw_slowdown", "sw_power_cap")
    assert sum_up([]) is None


def test_a_record_of_earlier_days_is_read() -> None:
    old = '{"sm_mhz": 1500, "sm_max_mhz": 1980, "memory_mhz": 2600, "temperature_c": 66}'
    found = Clocks.model_validate_json(old)
    assert (found.sm_mhz, found.num_readings, found.busy_percent) == (1500, 0, None)
