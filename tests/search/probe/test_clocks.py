"""What the driver's readings become in the record; records of earlier days are read as before."""

from __future__ import annotations

from dataclasses import replace

from planner.schema.record import Clocks, Spread
from search.probe.nvml import NvmlUtilization
from search.probe.worker.clocks import ClockReading, sum_up

READING = ClockReading(1500, 1980, 2600, 70, 300.0, NvmlUtilization(90, 40), ("sw_power_cap",))


def test_spreads_are_over_all_readings_and_plain_figures_of_the_last() -> None:
    readings = [
        replace(READING, sm_mhz=1980, power_watts=100.0, utilization=NvmlUtilization(20, 5)),
        replace(READING, throttle_reasons=("hw_slowdown",)),
        replace(READING, sm_mhz=1400, utilization=None),
    ]
    found = sum_up(readings)
    assert found is not None
    assert (found.sm_mhz, found.num_readings) == (1400, 3)
    assert found.sm_mhz_spread == Spread(least=1400, median=1500, most=1980)
    assert found.power_watts_spread == Spread(least=100, median=300, most=300)
    assert found.busy_percent == Spread(least=20, median=55, most=90)
    assert found.memory_busy_percent == Spread(least=5, median=22.5, most=40)
    assert found.throttle_reasons == ("hw_slowdown", "sw_power_cap")
    assert sum_up([]) is None


def test_an_idle_gpu_is_a_figure_and_a_silent_driver_is_none() -> None:
    idle = sum_up([replace(READING, utilization=NvmlUtilization(0, 0))])
    assert idle is not None
    assert idle.busy_percent == Spread(least=0, median=0, most=0)
    silent = sum_up([ClockReading(None, None, None, None, None, None, ())])
    assert silent == Clocks(num_readings=1)


def test_a_record_of_earlier_days_is_read() -> None:
    old = '{"sm_mhz": 1500, "sm_max_mhz": 1980, "memory_mhz": 2600, "temperature_c": 66}'
    found = Clocks.model_validate_json(old)
    assert (found.sm_mhz, found.num_readings, found.busy_percent) == (1500, 0, None)
