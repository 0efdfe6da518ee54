"""Clocks, temperature and power of the device, read by NVML in a thread at a low rate."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

SAMPLE_SECONDS = 5.0
_MAX_READINGS = 4096  # of one interval


class Sampler:
    """Reads `find()`'s device each `seconds` until it is stopped; a device that cannot be found or
    read is asked no more. The thread is a daemon and holds nothing of the training's."""

    def __init__(self, find: Callable[[], Any | None], seconds: float = SAMPLE_SECONDS) -> None:
        self._find = find
        self._seconds = seconds
        self._readings: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="planner.watch", daemon=True)
        self.fault: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def take(self) -> dict[str, Any] | None:
        """What was read since the last call, summed up; None where nothing was."""
        readings, self._readings = self._readings, []
        return summary(readings)

    def _run(self) -> None:
        try:
            device = self._find()
            while device is not None and not self._stop.is_set():
                if len(self._readings) < _MAX_READINGS:
                    self._readings.append(_read(device))
                self._stop.wait(self._seconds)
        except Exception as error:  # a training must not hear of it here
            self.fault = error


def _read(device: Any) -> dict[str, Any]:
    memory, utilization = device.memory, device.utilization
    return {
        "busy_percent": utilization.gpu_percent if utilization is not None else None,
        "sm_mhz": device.sm_mhz,
        "temperature_c": device.temperature_c,
        "power_watts": device.power_watts,
        "device_used_bytes": memory.used if memory is not None else None,
        "reasons": device.throttle_reasons,
    }


def summary(readings: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The lowest clock, the highest temperature, mean power and utilisation, and the most memory in
    use on the device; `limits` are all reasons for lower clocks, `slowed_by` those that are no
    power cap."""
    from planner.machine.hardware.throttling import DISTURBING_REASONS

    if not readings:
        return None

    def known(key: str) -> list[Any]:
        return [reading[key] for reading in readings if reading[key] is not None]

    reasons = {reason for reading in readings for reason in reading["reasons"]}
    watts, busy = known("power_watts"), known("busy_percent")
    return {
        "readings": len(readings),
        "busy_percent": sum(busy) / len(busy) if busy else None,
        "sm_mhz": min(known("sm_mhz"), default=None),
        "temperature_c": max(known("temperature_c"), default=None),
        "power_watts": sum(watts) / len(watts) if watts else None,
        "device_used_bytes": max(known("device_used_bytes"), default=None),
        "limits": sorted(reasons) or None,
        "slowed_by": sorted(reasons & DISTURBING_REASONS.keys()) or None,
    }
