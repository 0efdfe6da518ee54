"""What a device says about a running step: time, memory and disturbances.

One meter for CUDA and one for the CPU, alike to the code that trains. Imported by the worker only.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from planner.schema.record import Clocks
from planner.units import format_bytes
from search.probe import resident
from search.probe.device import nvml_device
from search.probe.nvml import NvmlDevice

# Reasons for lower clocks that say the samples are not the device's best. A power cap is not one:
# large matrix work meets it on every card, and so will the training itself.
_DISTURBING = {
    "hw_slowdown",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
}
# Seconds between two readings of clocks and temperature while steps are timed.
_CLOCK_SECONDS = 1.0

Mark = torch.cuda.Event | float


class CapTooSmallError(MemoryError):
    """The cap does not even hold what a process takes before the model."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes since the last `reset_peak`; None where this device has no such figure."""

    peak_allocated: int
    peak_reserved: int | None
    device: int | None


class Meter(Protocol):
    """`in_flight` steps may be queued on the device while the next one is prepared."""

    in_flight: int

    def impose_cap(self, cap_bytes: int) -> None:
        """Let the worker have no more than `cap_bytes` from now on."""

    def lift_cap(self) -> None:
        """Let go of the cap where it binds more than the training (compilers, messages)."""

    def mark(self) -> Mark:
        """A point in the device's time."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Device time between two marks; waits for the second."""

    def synchronize(self) -> None: ...

    def reset_peak(self) -> None: ...

    def memory(self) -> MemoryUse: ...

    def live_bytes(self) -> int | None:
        """Bytes held by tensors now."""

    def observe(self) -> None:
        """Read the clocks, if the last reading is old."""

    def clocks(self) -> Clocks | None: ...

    def flags(self) -> list[str]:
        """What may have disturbed the samples, in words."""


def make_meter(device: str) -> Meter:
    """The meter of "cpu" or "cuda:N". For CUDA it creates the context."""
    return CpuMeter() if device == "cpu" else CudaMeter(device)


class CpuMeter:
    """Time by the host's clock, memory by the growth of the resident set over its construction.

    Pages of libraries count neither in the base nor in the growth: they come in when code first
    runs, whatever the setting.
    """

    in_flight = 0

    def __init__(self) -> None:
        resident.settle()
        self.base = resident.read_resident()
        self.cap: resident.GrowthCap | None = None
        self.peak_was_reset = False

    def impose_cap(self, cap_bytes: int) -> None:
        self.cap = resident.GrowthCap(self.base, cap_bytes)
        self.cap.impose()

    def lift_cap(self) -> None:
        if self.cap is not None:
            self.cap.lift()

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, start: Mark, end: Mark) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start

    def synchronize(self) -> None:
        pass

    def reset_peak(self) -> None:
        self.peak_was_reset = resident.reset_peak()

    def memory(self) -> MemoryUse:
        now = resident.read_resident()
        peak = max(now.peak - now.file, now.anonymous)
        return MemoryUse(max(0, peak - self.base.anonymous), None, None)

    def live_bytes(self) -> int | None:
        return None

    def observe(self) -> None:
        pass

    def clocks(self) -> Clocks | None:
        return None

    def flags(self) -> list[str]:
        return [] if self.peak_was_reset else ["the peak includes the warm-up"]


class CudaMeter:
    """Time by device events, memory by the caching allocator and the driver."""

    in_flight = 2

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.nvml = nvml_device(device)
        before = self.nvml.memory if self.nvml is not None else None
        self.used_before = before.used if before is not None else None
        self.others = _others(self.nvml)
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)  # creates the context
        self.total = torch.cuda.get_device_properties(self.device).total_memory
        self.readings: list[Clocks] = []
        self.last_reading = 0.0
        self.cap_flags: list[str] = []

    def impose_cap(self, cap_bytes: int) -> None:
        used = self._device_bytes() or 0
        context = max(0, used - torch.cuda.memory_reserved(self.device))
        if cap_bytes <= context:
            raise CapTooSmallError(
                f"the CUDA context alone takes {format_bytes(context)} "
                f"of the {format_bytes(cap_bytes)} there may be"
            )
        allocator = cap_bytes - context
        torch.cuda.set_per_process_memory_fraction(min(1.0, allocator / self.total), self.device)
        self.cap_flags.append(
            f"emulates a device of {format_bytes(cap_bytes)}: the caching allocator was held to "
            f"{format_bytes(allocator)}, the context was not"
        )

    def lift_cap(self) -> None:
        """Nothing: the cap binds the caching allocator alone, so no compiler meets it."""

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def memory(self) -> MemoryUse:
        return MemoryUse(
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
            self._device_bytes(),
        )

    def _device_bytes(self) -> int | None:
        """What the driver counts for this process: by its pid, else by what came since the start.

        In a container the driver knows other pids than we do. Without NVML, all that is used on the
        device is counted, which `flags` says.
        """
        own = [p for p in self._processes() if p[0] == os.getpid()]
        if own and own[0][1] is not None:
            return own[0][1]
        memory = self.nvml.memory if self.nvml is not None else None
        if memory is not None and self.used_before is not None:
            return memory.used - self.used_before
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def _processes(self) -> list[tuple[int, int | None]]:
        found = self.nvml.processes if self.nvml is not None else None
        return [(p.pid, p.used_bytes) for p in found or ()]

    def live_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self.device)

    def observe(self) -> None:
        now = time.perf_counter()
        if self.nvml is None or now - self.last_reading < _CLOCK_SECONDS:
            return
        self.last_reading = now
        self.readings.append(_read_clocks(self.nvml))

    def clocks(self) -> Clocks | None:
        """The last reading, under load, with all reasons for lower clocks that were ever seen."""
        if not self.readings:
            return None
        reasons = {reason for reading in self.readings for reason in reading.throttle_reasons}
        return self.readings[-1].model_copy(update={"throttle_reasons": tuple(sorted(reasons))})

    def flags(self) -> list[str]:
        found = [*self.cap_flags, *self.others]
        clocks = self.clocks()
        slowed = sorted(_DISTURBING.intersection(clocks.throttle_reasons if clocks else ()))
        if slowed:
            found.append(f"throttled: {', '.join(slowed)}")
        if self.nvml is None:
            found.append("device bytes include what other processes hold: NVML does not answer")
        stats = torch.cuda.memory_stats(self.device)
        for key, words in (
            ("num_alloc_retries", "allocations succeeded only after cached memory was given back"),
            ("num_ooms", "out-of-memory errors were caught inside the step"),
        ):
            if stats.get(key, 0):
                found.append(f"{stats[key]} {words}")
        return found


def _others(device: NvmlDevice | None) -> list[str]:
    """One flag where other processes were computing on the device before this one came."""
    others = (device.processes if device is not None else None) or ()
    if not others:
        return []
    held = sum(p.used_bytes or 0 for p in others)
    return [f"{len(others)} other processes on the GPU hold {format_bytes(held)}"]


def _read_clocks(device: NvmlDevice) -> Clocks:
    return Clocks(
        sm_mhz=device.sm_mhz,
        sm_max_mhz=device.sm_max_mhz,
        memory_mhz=device.memory_mhz,
        temperature_c=device.temperature_c,
        power_watts=device.power_watts,
        throttle_reasons=device.throttle_reasons,
    )
