"""The GPUs as NVIDIA's management library (NVML) knows them; asking it makes no CUDA context.

Every question returns None where the library, the device or the driver has no answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pynvml

from planner.machine.hardware.gpu import DetectedGpu

# nvmlClocksEventReasons: bits of why the clocks are lower than they could be.
_THROTTLE_REASONS = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_IDLE = 0x001  # a reason too, but no throttling
# From P5 on, of P0 … P15 (nvml.h: 15 is the least performance), a card counts as at rest. A
# judgement: no source names the border. 32 is "unknown".
_RESTING_STATES = range(5, 16)
# No driver; a card that is another container's; a board without this library's functions.
_NO_FAULTS = (
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_SUPPORTED,
)  # fmt: skip


@dataclass(frozen=True)
class NvmlMemory:
    """Bytes. `total` is what programs can use, without the driver's own reserve."""

    total: int
    used: int
    free: int


@dataclass(frozen=True)
class NvmlProcess:
    """A process with a context on the device; `used_bytes` is None where the driver hides it."""

    pid: int
    used_bytes: int | None


def _ask(question: Callable[..., Any], *arguments: Any) -> Any | None:
    try:
        return question(*arguments)
    except (pynvml.NVMLError, UnicodeDecodeError):
        return None


def _reading(question: Callable[..., Any], *arguments: Any) -> Any:
    """A property of a device: what the driver answers to a question with these arguments."""
    return property(lambda device: device.ask(question, *arguments))


@dataclass(frozen=True)
class NvmlDevice:
    """One GPU as the driver knows it.

    - `uuid`: `GPU-` and 32 hexadecimal digits with hyphens.
    - `utilization`: of the driver's last sampling period (between a sixth of a second and one, by
      nvml.h) the percents in which some kernel ran (`gpu`), and in which memory was read or written
      (`memory`): not how full the card was. None also on a card that is split, whose instances the
      driver does not tell apart.
    """

    handle: Any

    uuid = _reading(pynvml.nvmlDeviceGetUUID)
    sm_mhz = _reading(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
    sm_max_mhz = _reading(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM)
    memory_mhz = _reading(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM)
    temperature_c = _reading(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
    utilization = _reading(pynvml.nvmlDeviceGetUtilizationRates)

    def ask(self, question: Callable[..., Any], *arguments: Any) -> Any | None:
        return _ask(question, self.handle, *arguments)

    @property
    def name(self) -> str:
        return self.ask(pynvml.nvmlDeviceGetName) or "NVIDIA GPU"

    @property
    def pci_bus_id(self) -> str | None:
        """`00000000:01:00.0`, as nvidia-smi prints it."""
        pci = self.ask(pynvml.nvmlDeviceGetPciInfo)
        return pci.busId if pci is not None else None

    @property
    def is_split(self) -> bool | None:
        """Whether the card is split into MIG instances. Its memory is then not that of torch's
        device, and its name stands for all instances. None where the driver does not say."""
        modes = self.ask(pynvml.nvmlDeviceGetMigMode)
        return bool(modes[0]) if modes is not None else None

    @property
    def capability(self) -> tuple[int, int] | None:
        version = self.ask(pynvml.nvmlDeviceGetCudaComputeCapability)
        return (version[0], version[1]) if version is not None else None

    @property
    def memory(self) -> NvmlMemory | None:
        """None also where no device can have such figures."""
        info = self.ask(pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
        if info is None:
            return None
        total = info.total - info.reserved
        if not max(1, info.used, info.free) <= total < 2**63:
            return None
        return NvmlMemory(total, info.used, info.free)

    @property
    def processes(self) -> tuple[NvmlProcess, ...] | None:
        """All processes that compute on the device. In a container the pids are the host's."""
        for question in (
            pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
            pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
        ):
            processes = self.ask(question)
            # The first R535 drivers have longer entries in _v3: then pids of 0 are read.
            if processes is not None and all(process.pid for process in processes):
                return tuple(NvmlProcess(p.pid, p.usedGpuMemory) for p in processes)
        return None

    @property
    def power_watts(self) -> float | None:
        return self.watts(pynvml.nvmlDeviceGetPowerUsage)

    def watts(self, question: Callable[..., Any]) -> float | None:
        """What a question in milliwatts is answered."""
        milliwatts = self.ask(question)
        return None if milliwatts is None else milliwatts / 1000

    @property
    def throttle_reasons(self) -> tuple[str, ...]:
        bits = self._reasons()
        return tuple(name for bit, name in _THROTTLE_REASONS.items() if bits & bit)

    @property
    def is_resting(self) -> bool:
        """Whether the card is idle, and so may have lowered its clocks and the speed of its
        link."""
        state = self.ask(pynvml.nvmlDeviceGetPerformanceState)
        return bool(self._reasons() & _IDLE) or state in _RESTING_STATES

    def _reasons(self) -> int:
        """The bits of nvmlClocksEventReasons in force; 0 where the driver does not answer."""
        newer = self.ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons)
        if newer is not None:
            return int(newer)
        return self.ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0


def devices() -> tuple[NvmlDevice | None, ...]:
    """The GPUs in PCI order, as nvidia-smi lists them; None for one that does not answer. Empty
    where there is no driver."""
    count = _ask(pynvml.nvmlDeviceGetCount) if _is_ready() else None
    return tuple(device_at(index) for index in range(count or 0))


def device_at(index: int) -> NvmlDevice | None:
    """The GPU with this index in PCI order."""
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index) if _is_ready() else None
    return NvmlDevice(handle) if handle is not None else None


def detected_gpus() -> tuple[DetectedGpu, ...]:
    """The GPUs that answer."""
    driver = driver_version() or ""
    return tuple(
        DetectedGpu(
            index=index,
            name=gpu.name,
            uuid=gpu.uuid or "",
            total_bytes=gpu.memory.total if gpu.memory else None,
            used_bytes=gpu.memory.used if gpu.memory else None,
            driver=driver,
            capability=gpu.capability,
            is_split=bool(gpu.is_split),
            pci_bus_id=gpu.pci_bus_id or "",
        )
        for index, gpu in enumerate(devices())
        if gpu is not None
    )


def driver_version() -> str | None:
    return _ask(pynvml.nvmlSystemGetDriverVersion) if _is_ready() else None


@lru_cache(maxsize=1)
def _is_ready() -> bool:
    """Whether the driver's library is there and answers."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def why_silent() -> str:
    """Why the driver, or the first card that does not answer, is silent, in the library's words; ""
    where all cards answer, where a container may not ask, and where there is no such library."""
    subject = ""
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            subject = f"GPU {index}: "
            pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return "" if error.value in _NO_FAULTS else f"{subject}{error}"
    return ""
