"""What a device says of its memory, asked at intervals. Imported only where torch is."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch

from planner.core.units import KIB


def find_device(wanted: str | None) -> Device:
    """The one named, or else the current GPU of this process, or the CPU."""
    if wanted is not None and not wanted.startswith("cuda"):
        return CpuDevice()
    if not torch.cuda.is_available():
        return CpuDevice()
    index = torch.device(wanted).index if wanted else None
    return CudaDevice(torch.cuda.current_device() if index is None else index)


@dataclass(frozen=True)
class CpuDevice:
    """Figures in bytes, and counts; asking for them waits for nothing."""

    index: None = None

    def describe(self) -> dict[str, Any]:
        from planner.machine.hardware.processor import cpu_name

        return {"kind": "cpu", "name": cpu_name()}

    def memory(self) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_resident_bytes": peak if sys.platform == "darwin" else peak * KIB}


@dataclass(frozen=True)
class CudaDevice:
    """The device "cuda:`index`", as a CpuDevice."""

    index: int

    def describe(self) -> dict[str, Any]:
        found = torch.cuda.get_device_properties(self.index)
        return {
            "kind": "cuda",
            "name": found.name,
            "index": self.index,
            "total_bytes": found.total_memory,
            "uuid": str(getattr(found, "uuid", "")) or None,
        }

    def memory(self) -> dict[str, Any]:
        return memory_of(torch.cuda.memory_stats(self.index))


Device = CpuDevice | CudaDevice


def memory_of(stats: dict[str, int]) -> dict[str, Any]:
    """The figures of `torch.cuda.memory_stats` that a plan speaks of."""
    return {
        "allocated_bytes": stats.get("allocated_bytes.all.current"),
        "peak_allocated_bytes": stats.get("allocated_bytes.all.peak"),
        "reserved_bytes": stats.get("reserved_bytes.all.current"),
        "peak_reserved_bytes": stats.get("reserved_bytes.all.peak"),
        "alloc_retries": stats.get("num_alloc_retries", 0),
        "ooms": stats.get("num_ooms", 0),
    }


def find_driver_device(device: Device) -> Any | None:
    """The driver's handle of it, found by the UUID that torch tells; None on the CPU, and where
    torch tells none or the driver knows none by it."""
    if device.index is None:
        return None
    from planner.machine import nvml

    uuid = (device.describe().get("uuid") or "").casefold().removeprefix("gpu-")
    for found in nvml.devices() if uuid else ():
        if found is not None and (found.uuid or "").casefold().removeprefix("gpu-") == uuid:
            return found
    return None


class Scalar:
    """A number that a training computes on its device, read without waiting for it.

    A GPU's is copied to pinned memory behind what is queued; `value` is the newest that has
    arrived. A number of the host's is there at once.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._pending: tuple[Any, Any] | None = None

    def read(self, number: Any) -> float | None:
        """Ask for `number`, and return the newest that is known."""
        self.settle()
        if isinstance(number, torch.Tensor):
            if number.numel() != 1 or number.device.type not in ("cpu", "cuda"):
                return self.value
            if number.device.type == "cuda":
                if self._pending is None:
                    self._copy(number)
                return self.value
            self.value = float(number.detach())
        elif number is not None:
            self.value = float(number)
        return self.value

    def settle(self) -> None:
        """Take what was asked for before, if it is there by now."""
        if self._pending is not None and self._pending[1].query():
            self.value = float(self._pending[0])
            self._pending = None

    def _copy(self, number: torch.Tensor) -> None:
        with torch.no_grad(), torch.cuda.device(number.device):
            room = torch.empty((), dtype=torch.float32, pin_memory=True)
            room.copy_(number.detach().reshape(()), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending = room, event
