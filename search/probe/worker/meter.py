"""What a device says about a running step: time, memory and disturbances.

One meter for CUDA and one for the CPU, with the same methods. Only the worker imports this. First
`Meter`, then the two meters, then a GPU's clocks, then the memory of this process.
"""

import ctypes
import gc
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from planner.core.schema.record import Clocks, Spread, noteworthy_bytes
from planner.core.units import KIB, format_bytes
from planner.machine.emulated import is_emulated
from planner.machine.hardware.gpu import DISTURBING_REASONS
from planner.machine.nvml import NvmlDevice
from search.probe.device import (
    Reading,
    agree,
    measure_context,
    nvml_device,
    others_bytes,
    process_bytes,
)

# Counts of the caching allocator that show that memory ran out in a step, and the flag of each.
_FAILED_ALLOCATIONS = {
    "num_alloc_retries": "allocations succeeded only after cached memory was given back",
    "num_ooms": "out-of-memory errors were caught inside the step",
}
# The flag of a run on an emulated GPU: nobody may take its rate for a measured one.
EMULATED = "an emulated GPU: its memory is torch's own, its times are predicted and not measured"
# Seconds between two readings of clocks and temperature while steps are timed.
_CLOCK_SECONDS = 1.0

Mark = Any  # a point in a device's time: an event of CUDA's, or seconds


@dataclass(frozen=True)
class MemoryUse:
    """Bytes since the last `reset_peak`; None where this device has no such figure."""

    peak_allocated: int
    peak_reserved: int | None
    device: int | None


@dataclass(frozen=True)
class Crowding:
    """How other processes crowd a device's memory, in bytes: what they had left free when the meter
    was made, and what they have taken since then; None where it is not known."""

    free_bytes: int | None = None
    taken_bytes: int | None = None


class Meter:
    """Measures a running step on a device. This base class serves a device without clocks,
    allocator or other processes.

    `in_flight` steps may be queued on the device while the host prepares the next one.
    """

    in_flight = 0

    def impose_cap(self, cap_bytes: int) -> None:
        """Limits the worker to `cap_bytes` from now on. A second call changes nothing unless the
        cap was lifted."""
        raise NotImplementedError

    def lift_cap(self) -> None:
        """Lifts the cap where it would bind more than the training: compilers, messages."""

    def mark(self) -> Mark:
        """A point in the device's time."""
        raise NotImplementedError

    def seconds(self, start: Mark, end: Mark) -> float:
        """The seconds of the device between two marks. Waits for the second mark."""
        raise NotImplementedError

    def synchronize(self) -> None:
        pass

    def reset_peak(self) -> None:
        pass

    def release_cache(self) -> tuple[int, int] | None:
        """Returns unused memory of the caching allocator to the device. Returns the bytes reserved
        before and after; None without such an allocator."""
        return None

    def memory(self) -> MemoryUse:
        raise NotImplementedError

    def observe(self) -> None:
        """Reads the clocks if the last reading is old."""

    def clocks(self) -> Clocks | None:
        return None

    def crowding(self) -> Crowding:
        """What other processes left and took of the memory until now. Never raises: it is called
        after failures too."""
        return Crowding()

    def flags(self) -> list[str]:
        """What may have disturbed the samples, as text. Never raises, as above."""
        return []


def make_meter(device: str) -> Meter:
    """The meter of "cpu" or "cuda:N". The meter of a GPU creates its CUDA context."""
    return CpuMeter() if device == "cpu" else CudaMeter(device)


class CpuMeter(Meter):
    """Measures time by a clock of the host, and memory by the growth of the resident set since the
    meter was made.

    Pages of libraries count neither in the base nor in the growth: they are loaded when code first
    runs, whatever the setting.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        gc.collect()  # growth is counted from memory in use: what is free goes to the system
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim is not None:
            trim(0)
        self.base = read_resident()
        self.limits = resource.getrlimit(resource.RLIMIT_DATA)  # soft, hard
        self.peak_was_reset: bool | None = None  # None: nobody has tried yet

    def impose_cap(self, cap_bytes: int) -> None:
        """Limits the growth of this process's own memory.

        RLIMIT_DATA counts private writable memory, and the allocation that exceeds it fails: an
        out-of-memory in the very operation that allocated. It also counts memory that was never
        touched, so the limit is `UNTOUCHED_BYTES` above the cap; between the two, the measured peak
        decides. Only the soft limit is set, so that it can be lifted.
        """
        limit, hard = self.base.data + cap_bytes + UNTOUCHED_BYTES, self.limits[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def lift_cap(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self.limits)

    def mark(self) -> Mark:
        return self.clock()

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def reset_peak(self) -> None:
        self.peak_was_reset = reset_peak()

    def memory(self) -> MemoryUse:
        resident = read_resident()
        peak = max(resident.peak - resident.file, resident.anonymous)
        return MemoryUse(max(0, peak - self.base.anonymous), None, None)

    def flags(self) -> list[str]:
        return ["the peak includes the warm-up"] if self.peak_was_reset is False else []


class CudaMeter(Meter):
    """Measures time by device events, and memory by the caching allocator and the driver.

    The driver's figures are believed where they agree with torch's: see `search/probe/device.py`.
    """

    in_flight = 2

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.nvml = nvml_device(device)
        # The driver's figures before the context is made.
        before = self.nvml.memory if self.nvml is not None else None
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)  # creates the context
        self.total: int = torch.cuda.get_device_properties(self.device).total_memory
        self.doubts: list[str] = [EMULATED] if is_emulated() else []
        if before is not None and not agree(before.total, self.total):
            self.doubts.append(
                f"NVML's figures are left aside: its device has {format_bytes(before.total)}, "
                f"torch's {format_bytes(self.total)}"
            )
            self.nvml = before = None
        self.used_before = before.used if before is not None else None
        reading = self._read_memory()
        self.context = measure_context(self.used_before, reading)
        self.free_before = before.free if before is not None else self._free_before(reading)
        self.others_before = self.used_before
        if self.others_before is None:
            self.others_before = others_bytes(self.context, reading)
        self.readings: list[ClockReading] = []
        self.last_reading = 0.0
        self.cap: int | None = None
        self.failures_before: dict[str, int] = {}

    def impose_cap(self, cap_bytes: int) -> None:
        """Limits the caching allocator of this process, and is never lifted. A compiler that times
        kernels here meets the cap as on the smaller card, and leaves out what does not fit."""
        if self.cap == cap_bytes:
            return
        context = self.context
        if cap_bytes <= context.num_bytes:
            raise MemoryError(
                f"the CUDA context takes {format_bytes(context.num_bytes)} ({context.source}) "
                f"of the {format_bytes(cap_bytes)} allowed"
            )
        share = min(1.0, (cap_bytes - context.num_bytes) / self.total)
        torch.cuda.set_per_process_memory_fraction(share, self.device)
        self.cap = cap_bytes

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.failures_before = self._allocation_failures()

    def release_cache(self) -> tuple[int, int] | None:
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.empty_cache()
        return before, torch.cuda.memory_reserved(self.device)

    def memory(self) -> MemoryUse:
        reserved = torch.cuda.max_memory_reserved(self.device)
        return MemoryUse(
            torch.cuda.max_memory_allocated(self.device),
            reserved,
            process_bytes(self.context, reserved, self.used_before, self._read_memory()),
        )

    def crowding(self) -> Crowding:
        others = others_bytes(self.context, self._read_memory())
        if others is None or self.others_before is None:
            return Crowding(self.free_before)
        return Crowding(self.free_before, max(0, others - self.others_before))

    def _read_memory(self) -> Reading:
        """A reading of the driver's figures; without NVML, CUDA's figure of the whole device."""
        reserved = torch.cuda.memory_reserved(self.device)
        memory = self.nvml.memory if self.nvml is not None else None
        if self.nvml is None or memory is None:
            free = self._free_bytes()
            return Reading(reserved, None if free is None else self.total - free)
        of_process = [p.used_bytes for p in self.nvml.processes or () if p.pid == os.getpid()]
        return Reading(reserved, memory.used, of_process[0] if of_process else None)

    def _free_bytes(self) -> int | None:
        try:
            free: int = torch.cuda.mem_get_info(self.device)[0]
        except RuntimeError:  # after an illegal access the context answers nothing any more
            return None
        return free if 0 <= free <= self.total else None

    def _free_before(self, reading: Reading) -> int | None:
        """The bytes that were free before the context was made, from CUDA's figures, which can only
        be read afterwards."""
        if reading.used is None:
            return None
        used_before = reading.used - reading.reserved - self.context.num_bytes
        return self.total - max(0, used_before)

    def observe(self) -> None:
        now = time.perf_counter()
        if self.nvml is None or now - self.last_reading < _CLOCK_SECONDS:
            return
        self.last_reading = now
        self.readings.append(read_clocks(self.nvml))

    def clocks(self) -> Clocks | None:
        return summarize_clocks(self.readings)

    def flags(self) -> list[str]:
        flags = [*self.doubts]
        if self.cap is not None:
            flags.append(
                f"emulates a device of {format_bytes(self.cap)}: the caching allocator was held to "
                f"{format_bytes(self.cap - self.context.num_bytes)}, the context was not"
            )
        flags += self._others_flags()
        clocks = self.clocks()
        slowed = sorted(DISTURBING_REASONS.keys() & set(clocks.throttle_reasons if clocks else ()))
        if slowed:
            flags.append(f"throttled: {', '.join(slowed)}")
        failures = self._allocation_failures()
        for key, text in _FAILED_ALLOCATIONS.items():
            count = failures.get(key, 0) - self.failures_before.get(key, 0)
            if count > 0:
                flags.append(f"{count} {text}")
        return flags

    def _others_flags(self) -> list[str]:
        """The memory that other processes held when this one began, and what they took since, if
        there is enough of it to matter."""
        flags = []
        min_bytes = noteworthy_bytes(self.total)
        bytes_before = self.others_before or 0
        if bytes_before > min_bytes:
            flags.append(f"other processes on the GPU hold {format_bytes(bytes_before)}")
        taken = self.crowding().taken_bytes or 0
        if taken > min_bytes:
            flags.append(f"other processes took {format_bytes(taken)} of the GPU meanwhile")
        return flags

    def _allocation_failures(self) -> dict[str, int]:
        stats = torch.cuda.memory_stats(self.device)
        return {key: stats.get(key, 0) for key in _FAILED_ALLOCATIONS}


# The clocks of a GPU while steps were timed, summarized for the record.

# The fields that the last reading gives.
_LAST_READING_FIELDS = (
    "sm_mhz", "sm_max_mhz", "memory_mhz", "temperature_c", "power_watts", "throttle_reasons",
)  # fmt: skip
# The fields that are a spread over all readings, and the figure of a reading that each is made of.
_SPREADS = {
    "busy_percent": "gpu_percent", "memory_busy_percent": "memory_percent",
    "sm_mhz_spread": "sm_mhz", "power_watts_spread": "power_watts",
}  # fmt: skip

# One reading of the driver's figures, by name; None is a figure that the driver does not have.
ClockReading = Mapping[str, Any]


def read_clocks(device: NvmlDevice) -> ClockReading:
    utilization = device.utilization
    return {name: getattr(device, name) for name in _LAST_READING_FIELDS} | {
        "gpu_percent": utilization and utilization.gpu,
        "memory_percent": utilization and utilization.memory,
    }  # fmt: skip


def summarize_clocks(readings: Sequence[ClockReading]) -> Clocks | None:
    """The last reading, which was under load; all reasons for lower clocks in any reading; and the
    spread of the other figures over all readings."""
    if not readings:
        return None
    fields = {name: readings[-1][name] for name in _LAST_READING_FIELDS}
    fields["throttle_reasons"] = sorted(
        {reason for r in readings for reason in r["throttle_reasons"]}
    )
    for field, name in _SPREADS.items():
        if values := [reading[name] for reading in readings if reading[name] is not None]:
            fields[field] = Spread(least=min(values), median=median(values), most=max(values))
    return Clocks(num_readings=len(readings), **fields)


# Libraries reserve this beside tensors and hardly touch it. Measured: 20 to 30 MiB of oneDNN's code
# buffers in bf16 training of a four-block Swin (torch 2.13, AMD EPYC, 2026-11); none in fp32.
UNTOUCHED_BYTES = 64 * 1024 * KIB


@dataclass(frozen=True)
class Resident:
    """One reading of /proc/self/status, in bytes.

    `anonymous` and `file` are the parts of the resident set: allocated memory, and pages of
    programs and libraries. `peak` is the high-water mark of the whole set. `data` is the address
    space of private writable memory, which RLIMIT_DATA counts.
    """

    anonymous: int
    file: int
    peak: int
    data: int


def read_resident() -> Resident:
    """The memory of this process now."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0]) * KIB
    shared = fields["RssFile"] + fields["RssShmem"]
    return Resident(fields["RssAnon"], shared, fields["VmHWM"], fields["VmData"])


def reset_peak() -> bool:
    """Sets the high-water mark to the current size. Returns False if the kernel does not allow
    it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
