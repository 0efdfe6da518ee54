"""How steps are timed on a device that runs behind, and what the readings of its clocks sum to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.core.schema import FactoryModel, TrainSetting
from planner.core.schema.record import Clocks, Spread
from planner.machine.nvml import NvmlUtilization
from search.probe.protocol import ProbeRequest, Report
from search.probe.stopping import StopRule
from search.probe.worker import measure, meter
from search.probe.worker.clocks import ClockReading, sum_up


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
