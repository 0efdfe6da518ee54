"""Reasons for low clocks that make a measurement untrustworthy, by the driver's names for them."""

from __future__ import annotations

# Heat and supply, of nvmlClocksEventReasons (nvml.h) without its prefix; the gravest that can be
# named comes first. A power cap is none of them: large matrix work meets it on every card, and so
# will the training itself.
DISTURBING_REASONS = {
    "hw_thermal_slowdown": "the hardware has at least halved the clocks because of heat",
    "hw_power_brake_slowdown": "the power supply asked the hardware to at least halve the clocks",
    "hw_slowdown": "the hardware has at least halved the clocks",
    "sw_thermal_slowdown": "the driver has lowered the clocks because of heat",
}
