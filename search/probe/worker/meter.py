"""What a device says about a running step: time, memory and disturbances.

One meter for CUDA and one for the CPU, alike to the code that trains. Imported by the worker only.
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
from planner.machine.nvml import NvmlDevice, NvmlMemory
from search.probe.device import (
    Reading,
    agree,
    measure_context,
    nvml_device,
    others_bytes,
    process_bytes,
)

# Counts of the caching allocator that say a step met the end of memory, in words.
_FAILED_ALLOCATIONS = {
    "num_alloc_retries": "allocations succeeded only after cached memory was given back",
    "num_ooms": "out-of-memory errors were caught inside the step",
}
# The flag of what ran on no GPU: nobody may take its rate for one.
EMULATED = "an emulated GPU: its memory is torch's own, its times are predicted and not measured"
# Seconds between two readings of clocks and temperature while steps are timed.
_CLOCK_SECONDS = 1.0

Mark = Any  # of a device: an event of CUDA's, or seconds


@dataclass(frozen=True)
class MemoryUse:
    """Bytes since the last `reset_peak`; None where this device has no such figure."""

    peak_allocated: int
    peak_reserved: int | None
    device: int | None


@dataclass(frozen=True)
class Crowding:
    """What other processes did to a device's memory, in bytes: what they had left free when the
    meter was made, and what they took from then until now; None where nobody says."""

    free_bytes: int | None = None
    taken_bytes: int | None = None


class Meter:
    """What a device says; here what one says that has no clocks, no allocator and no neighbours.

    `in_flight` steps may be queued on the device while the next one is prepared.
    """

    in_flight = 0

    def impose_cap(self, cap_bytes: int) -> None:
        """Let the worker have no more than `cap_bytes` from now on. Imposing it again where it was
        not lifted changes nothing."""
        raise NotImplementedError

    def lift_cap(self) -> None:
        """Let go of the cap where it binds more than the training (compilers, messages)."""

    def mark(self) -> Mark:
        """A point in the device's time."""
        raise NotImplementedError

    def seconds(self, start: Mark, end: Mark) -> float:
        """Device time between two marks; waits for the second."""
        raise NotImplementedError

    def synchronize(self) -> None:
        pass

    def reset_peak(self) -> None:
        pass

    def release_cache(self) -> tuple[int, int] | None:
        """Give the device what the allocator keeps and nothing uses: bytes reserved before and
        after. None where there is no such allocator."""
        return None

    def memory(self) -> MemoryUse:
        raise NotImplementedError

    def observe(self) -> None:
        """Read the clocks, if the last reading is old."""

    def clocks(self) -> Clocks | None:
        return None

    def crowding(self) -> Crowding:
        """What others left and took of the memory, until now. Never raises: it is asked after
        failures too."""
        return Crowding()

    def flags(self) -> list[str]:
        """What may have disturbed the samples, in words. Never raises, as above."""
        return []


def make_meter(device: str) -> Meter:
    """The meter of "cpu" or "cuda:N". For CUDA it creates the context."""
    return CpuMeter() if device == "cpu" else CudaMeter(device)


class CpuMeter(Meter):
    """Time by a clock of the host, memory by the growth of the resident set over its construction.

    Pages of libraries count neither in the base nor in the growth: they come in when code first
    runs, whatever the setting.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        settle()
        self.base = read_resident()
        self.limits = resource.getrlimit(resource.RLIMIT_DATA)  # soft, hard
        self.peak_was_reset: bool | None = None  # None: it was not asked for yet

    def impose_cap(self, cap_bytes: int) -> None:
        """A wall for the growth of this process's own memory.

        RLIMIT_DATA counts private writable memory and makes the allocation that breaks it fail: an
        out-of-memory in the very operation that asked. It counts what was never touched, too, so
        the wall stands `UNTOUCHED_BYTES` behind the cap; between the two, the measured peak
        decides. Only the soft limit is set, so that it can be lifted.
        """
        wall, hard = self.base.data + cap_bytes + UNTOUCHED_BYTES, self.limits[1]
        soft = wall if hard == resource.RLIM_INFINITY else min(wall, hard)
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
        now = read_resident()
        peak = max(now.peak - now.file, now.anonymous)
        return MemoryUse(max(0, peak - self.base.anonymous), None, None)

    def flags(self) -> list[str]:
        return ["the peak includes the warm-up"] if self.peak_was_reset is False else []


class CudaMeter(Meter):
    """Time by device events, memory by the caching allocator and the driver.

    The driver's figures are believed as far as they agree with torch's: see `accounting`.
    """

    in_flight = 2

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.nvml = nvml_device(device)
        before = self.nvml.memory if self.nvml is not None else None
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)  # creates the context
        self.total: int = torch.cuda.get_device_properties(self.device).total_memory
        self.doubts: list[str] = [EMULATED] if is_emulated() else []
        if before is not None and not agree(before.total, self.total):
            self.doubts.append(_doubt(before, self.total))
            self.nvml = before = None
        self.used_before = before.used if before is not None else None
        now = self._read()
        self.context = measure_context(self.used_before, now)
        self.free_before = before.free if before is not None else self._free_before(now)
        self.others_before = self.used_before
        if self.others_before is None:
            self.others_before = others_bytes(self.context, now)
        self.readings: list[ClockReading] = []
        self.last_reading = 0.0
        self.cap: int | None = None
        self.failures_before: dict[str, int] = {}

    def impose_cap(self, cap_bytes: int) -> None:
        """It binds the caching allocator of this process and is never lifted. A compiler that times
        kernels here meets it as on the smaller card, and leaves out what does not fit."""
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
            process_bytes(self.context, reserved, self.used_before, self._read()),
        )

    def crowding(self) -> Crowding:
        now = others_bytes(self.context, self._read())
        if now is None or self.others_before is None:
            return Crowding(self.free_before)
        return Crowding(self.free_before, max(0, now - self.others_before))

    def _read(self) -> Reading:
        """What the driver says now; where NVML does not, the use of the whole device from CUDA."""
        reserved = torch.cuda.memory_reserved(self.device)
        memory = self.nvml.memory if self.nvml is not None else None
        if self.nvml is None or memory is None:
            free = self._free()
            return Reading(reserved, None if free is None else self.total - free)
        own = [p.used_bytes for p in self.nvml.processes or () if p.pid == os.getpid()]
        return Reading(reserved, memory.used, own[0] if own else None)

    def _free(self) -> int | None:
        try:
            free: int = torch.cuda.mem_get_info(self.device)[0]
        except RuntimeError:  # an illegal access leaves a context that answers nothing any more
            return None
        return free if 0 <= free <= self.total else None

    def _free_before(self, now: Reading) -> int | None:
        """What was free before the context came, by CUDA, which could not be asked before."""
        if now.used is None:
            return None
        return min(self.total, self.total - now.used + now.reserved + self.context.num_bytes)

    def observe(self) -> None:
        now = time.perf_counter()
        if self.nvml is None or now - self.last_reading < _CLOCK_SECONDS:
            return
        self.last_reading = now
        self.readings.append(read_clocks(self.nvml))

    def clocks(self) -> Clocks | None:
        return sum_up(self.readings)

    def flags(self) -> list[str]:
        found = [*self.doubts, *self._cap_flags(), *self._others_flags()]
        clocks = self.clocks()
        slowed = sorted(DISTURBING_REASONS.keys() & set(clocks.throttle_reasons if clocks else ()))
        if slowed:
            found.append(f"throttled: {', '.join(slowed)}")
        failures = self._allocation_failures()
        for key, words in _FAILED_ALLOCATIONS.items():
            count = failures.get(key, 0) - self.failures_before.get(key, 0)
            if count > 0:
                found.append(f"{count} {words}")
        return found

    def _cap_flags(self) -> list[str]:
        if self.cap is None:
            return []
        return [
            f"emulates a device of {format_bytes(self.cap)}: the caching allocator was held to "
            f"{format_bytes(self.cap - self.context.num_bytes)}, the context was not"
        ]

    def _others_flags(self) -> list[str]:
        """Who else held memory when this process came, and what others took since, from what is
        worth a word on."""
        found = []
        least = noteworthy_bytes(self.total)
        held = self.others_before or 0
        if held > least:
            found.append(f"other processes on the GPU hold {format_bytes(held)}")
        taken = self.crowding().taken_bytes or 0
        if taken > least:
            found.append(f"other processes took {format_bytes(taken)} of the GPU meanwhile")
        return found

    def _allocation_failures(self) -> dict[str, int]:
        stats = torch.cuda.memory_stats(self.device)
        return {key: stats.get(key, 0) for key in _FAILED_ALLOCATIONS}


def _doubt(memory: NvmlMemory, total: int) -> str:
    return (
        f"NVML's figures are left aside: its device has {format_bytes(memory.total)}, "
        f"torch's {format_bytes(total)}"
    )


# What a GPU's driver said while steps were timed, summed up for the record.

# The fields that the last reading gives.
_LAST_READING_FIELDS = (
    "sm_mhz", "sm_max_mhz", "memory_mhz", "temperature_c", "power_watts", "throttle_reasons",
)  # fmt: skip
# The fields that are a spread over all readings, and what is read for each.
_SPREADS = {
    "busy_percent": "gpu_percent", "memory_busy_percent": "memory_percent",
    "sm_mhz_spread": "sm_mhz", "power_watts_spread": "power_watts",
}  # fmt: skip

# One answer of the driver, by the names of its fields; what it has no answer to is None.
ClockReading = Mapping[str, Any]


def read_clocks(device: NvmlDevice) -> ClockReading:
    used = device.utilization
    return {name: getattr(device, name) for name in _LAST_READING_FIELDS} | {
        "gpu_percent": used and used.gpu_percent, "memory_percent": used and used.memory_percent,
    }  # fmt: skip


def sum_up(readings: Sequence[ClockReading]) -> Clocks | None:
    """The last reading, under load, with all reasons for lower clocks that were ever seen, and
    between what the others lay."""
    if not readings:
        return None
    found = {name: readings[-1][name] for name in _LAST_READING_FIELDS}
    found["throttle_reasons"] = sorted({why for r in readings for why in r["throttle_reasons"]})
    for field, name in _SPREADS.items():
        if known := [reading[name] for reading in readings if reading[name] is not None]:
            found[field] = Spread(least=min(known), median=median(known), most=max(known))
    return Clocks(num_readings=len(readings), **found)


# What libraries reserve beside tensors and hardly touch. Measured: 20 to 30 MiB of oneDNN's code
# buffers in bf16 training of a four-block Swin (torch 2.13, AMD EPYC, 2026-11); none in fp32.
UNTOUCHED_BYTES = 64 * 1024 * KIB


@dataclass(frozen=True)
class Resident:
    """One reading of /proc/self/status, in bytes.

    `anonymous` and `file` are the parts of the resident set: what was allocated, and pages of
    programs and libraries. `peak` is the high-water mark of the whole, `data` the address space of
    private writable memory, which is what RLIMIT_DATA counts.
    """

    anonymous: int
    file: int
    peak: int
    data: int


def read_resident() -> Resident:
    """What this process holds now."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0]) * KIB
    shared = fields["RssFile"] + fields["RssShmem"]
    return Resident(fields["RssAnon"], shared, fields["VmHWM"], fields["VmData"])


def reset_peak() -> bool:
    """Set the high-water mark to what is held now; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def settle() -> None:
    """Give back what is free, so that growth is counted from what is really held."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)
