"""What a GPU's driver said while steps were timed, summed up for the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from planner.core.schema.record import Clocks, Spread
from planner.machine.nvml import NvmlDevice

_PLAIN = ("sm_mhz", "sm_max_mhz", "memory_mhz", "temperature_c", "power_watts", "throttle_reasons")
# The fields that are a spread over all readings, and what is read for each.
_SPREADS = {
    "busy_percent": "gpu_percent", "memory_busy_percent": "memory_percent",
    "sm_mhz_spread": "sm_mhz", "power_watts_spread": "power_watts",
}  # fmt: skip

# One answer of the driver, by the names of its fields; what it has no answer to is None.
Reading = Mapping[str, Any]


def read_clocks(device: NvmlDevice) -> Reading:
    used = device.utilization
    return {name: getattr(device, name) for name in _PLAIN} | {
        "gpu_percent": used and used.gpu_percent, "memory_percent": used and used.memory_percent,
    }  # fmt: skip


def sum_up(readings: Sequence[Reading]) -> Clocks | None:
    """The last reading, under load, with all reasons for lower clocks that were ever seen, and
    between what the others lay."""
    if not readings:
        return None
    found = {name: readings[-1][name] for name in _PLAIN}
    found["throttle_reasons"] = sorted({why for r in readings for why in r["throttle_reasons"]})
    for field, name in _SPREADS.items():
        if known := [reading[name] for reading in readings if reading[name] is not None]:
            found[field] = Spread(least=min(known), median=median(known), most=max(known))
    return Clocks(num_readings=len(readings), **found)
