"""What a GPU's driver said while steps were timed, summed up for the record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from planner.core.schema.record import Clocks, Spread
from planner.machine.nvml import NvmlDevice, NvmlUtilization


@dataclass(frozen=True)
class ClockReading:
    """One answer of the driver; what it has no answer to is None."""

    sm_mhz: int | None
    sm_max_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    power_watts: float | None
    utilization: NvmlUtilization | None
    throttle_reasons: tuple[str, ...]


def read_clocks(device: NvmlDevice) -> ClockReading:
    return ClockReading(
        sm_mhz=device.sm_mhz,
        sm_max_mhz=device.sm_max_mhz,
        memory_mhz=device.memory_mhz,
        temperature_c=device.temperature_c,
        power_watts=device.power_watts,
        utilization=device.utilization,
        throttle_reasons=device.throttle_reasons,
    )


def sum_up(readings: Sequence[ClockReading]) -> Clocks | None:
    """The last reading, under load, with all reasons for lower clocks that were ever seen, and
    between what the others lay."""
    if not readings:
        return None
    last = readings[-1]
    told = [r.utilization for r in readings if r.utilization is not None]
    return Clocks(
        sm_mhz=last.sm_mhz,
        sm_max_mhz=last.sm_max_mhz,
        memory_mhz=last.memory_mhz,
        temperature_c=last.temperature_c,
        power_watts=last.power_watts,
        throttle_reasons=tuple(sorted({why for r in readings for why in r.throttle_reasons})),
        num_readings=len(readings),
        busy_percent=_spread(u.gpu_percent for u in told),
        memory_busy_percent=_spread(u.memory_percent for u in told),
        sm_mhz_spread=_spread(r.sm_mhz for r in readings),
        power_watts_spread=_spread(r.power_watts for r in readings),
    )


def _spread(figures: Iterable[float | None]) -> Spread | None:
    known = [figure for figure in figures if figure is not None]
    if not known:
        return None
    return Spread(least=min(known), median=median(known), most=max(known))
