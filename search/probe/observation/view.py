"""What a device lets one see of a running step: one view of CUDA and one of the CPU, alike to the
code that looks. Imported by the process that looks only."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from search.probe.device import nvml_device
from search.probe.nvml import NvmlDevice
from search.probe.worker import process_memory
from search.probe.worker.history import record_history

# What is left of a device beside a ballast is asked of the driver, which gives whole pages.
_PAGE_BYTES = 2 * 1024**2
_SETTLING_SECONDS, _SETTLING_READINGS = 0.5, 20
# Parts of the names of kernels and operators that compute attention.
_ATTENTION_WORDS = ("attention", "fmha", "flash", "sdp", "cudnn_generated_fort", "mha")


class NotHereError(Exception):
    """This device cannot show what was to be seen."""


@dataclass(frozen=True)
class Kernels:
    """Names seen while something ran: operators of torch, and kernels on the device."""

    operators: tuple[str, ...]
    kernels: tuple[str, ...]

    def of_attention(self) -> dict[str, list[str]]:
        def chosen(names: Sequence[str]) -> list[str]:
            return sorted({n for n in names if any(w in n.lower() for w in _ATTENTION_WORDS)})

        return {"operators": chosen(self.operators), "kernels": chosen(self.kernels)}


class View(Protocol):
    """`is_cuda` tells what the figures are of: the caching allocator and the driver, or the
    resident set of this process."""

    device: torch.device
    is_cuda: bool

    def start(self) -> None:
        """Make the context; before it the device is untouched by this process."""

    def synchronize(self) -> None: ...

    def memory(self) -> dict[str, int]:
        """What is held now, in bytes, by the names of records."""

    def reset_peak(self) -> None: ...

    def release_cache(self) -> None: ...

    def held_peak(self) -> int:
        """The most bytes that tensors took at once since `reset_peak`: what no step can do without,
        however the allocator lays it out."""

    def leave_room(self, num_bytes: int) -> object:
        """Fill the device so that `num_bytes` are left; what is returned keeps it full."""

    def requests(self, call: Callable[[], object]) -> list[int]:
        """Bytes of each request for memory that `call` made, in order."""

    def clocks(self) -> dict[str, Any]:
        """Clocks, power and temperature; empty where nobody tells."""


def make_view(device: str) -> View:
    return CpuView() if device == "cpu" else CudaView(device)


def seen_kernels(view: View, call: Callable[[], object]) -> Kernels:
    """What runs while `call` does, by the profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if view.is_cuda else [])]
    with profile(activities=activities) as profiler:
        call()
        view.synchronize()
    operators: list[str] = []
    kernels: list[str] = []
    for event in profiler.events() or ():
        on_device = event.device_type != DeviceType.CPU
        (kernels if on_device else operators).append(event.name)
    return Kernels(tuple(operators), tuple(kernels))


def requests_in(trace: Sequence[Mapping[str, Any]]) -> list[int]:
    """Bytes of the requests in a recorded allocator history, in order."""
    return [entry["size"] for entry in trace if entry["action"] == "alloc"]


class CudaView:
    is_cuda = True

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.nvml = nvml_device(device)
        self.used_before = driver_used(self.nvml)

    def start(self) -> None:
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory(self) -> dict[str, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        found = {
            "allocated_bytes": torch.cuda.memory_allocated(self.device),
            "reserved_bytes": torch.cuda.memory_reserved(self.device),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(self.device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            "used_by_runtime_bytes": total - free,
        }
        used = driver_used(self.nvml)
        if used is not None:
            found["used_by_driver_bytes"] = used
            if self.used_before is not None:
                found["outside_reserved_bytes"] = used - self.used_before - found["reserved_bytes"]
        return found

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def release_cache(self) -> None:
        torch.cuda.empty_cache()

    def held_peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def leave_room(self, num_bytes: int) -> object:
        free = self._settled_free()
        ballast = max(0, free - num_bytes) // _PAGE_BYTES * _PAGE_BYTES
        if ballast == 0:
            raise NotHereError(f"only {free} bytes are free, and {num_bytes} were to be left")
        return torch.empty(ballast, dtype=torch.uint8, device=self.device)

    def _settled_free(self) -> int:
        """Bytes free once they no longer rise: the driver may still take back an ended process's
        memory."""
        free, _ = torch.cuda.mem_get_info(self.device)
        for _ in range(_SETTLING_READINGS):
            time.sleep(_SETTLING_SECONDS)
            before, (free, _) = free, torch.cuda.mem_get_info(self.device)
            if free <= before:
                break
        return int(free)

    def requests(self, call: Callable[[], object]) -> list[int]:
        snapshot = record_history(self.device, call)
        return requests_in(snapshot["device_traces"][self.device.index or 0])

    def clocks(self) -> dict[str, Any]:
        if self.nvml is None:
            return {}
        found = {
            "sm_mhz": self.nvml.sm_mhz,
            "memory_mhz": self.nvml.memory_mhz,
            "power_watts": self.nvml.power_watts,
            "temperature_c": self.nvml.temperature_c,
            "throttle_reasons": list(self.nvml.throttle_reasons),
        }
        return {name: value for name, value in found.items() if value is not None}


def driver_used(nvml: NvmlDevice | None) -> int | None:
    """Bytes in use on the whole device, as the driver says; None where it does not."""
    memory = nvml.memory if nvml is not None else None
    return memory.used if memory is not None else None


class CpuView:
    """The stand-in for a device: the memory of this process, and torch's CPU allocator."""

    is_cuda = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.base = process_memory.read_resident()

    def start(self) -> None:
        process_memory.settle()
        self.base = process_memory.read_resident()

    def synchronize(self) -> None:
        pass

    def memory(self) -> dict[str, int]:
        now = process_memory.read_resident()
        return {"resident_bytes": now.anonymous, "peak_resident_bytes": now.peak}

    def reset_peak(self) -> None:
        process_memory.reset_peak()

    def release_cache(self) -> None:
        gc.collect()
        process_memory.settle()

    def held_peak(self) -> int:
        now = process_memory.read_resident()
        return max(0, now.peak - now.file - self.base.anonymous)

    def leave_room(self, num_bytes: int) -> object:
        """A wall for this process's memory, and a ballast in front of it."""
        ballast = 64 * 1024**2
        cap = process_memory.GrowthCap(process_memory.read_resident(), ballast + num_bytes)
        cap.limit -= process_memory.UNTOUCHED_BYTES
        filled = torch.empty(ballast, dtype=torch.uint8)
        cap.impose()
        return filled, cap

    def requests(self, call: Callable[[], object]) -> list[int]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
        assert profiler.profiler is not None
        assert profiler.profiler.kineto_results is not None
        events = profiler.profiler.kineto_results.events()
        memory = [e for e in events if e.name() == "[memory]" and e.nbytes() > 0]
        return [e.nbytes() for e in sorted(memory, key=lambda e: e.start_ns())]

    def clocks(self) -> dict[str, Any]:
        load = os.getloadavg()[0]
        return {"load_average": round(load, 2)}
