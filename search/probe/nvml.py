"""The NVIDIA driver's management library, called directly: it makes no CUDA context.

Only what a probe needs, from nvml.h (the API is versioned by symbol, and old symbols stay). Every
question answers None where the library, the device or the driver has no answer.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_char, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from planner.environment.machine import DriverAnswer, DriverFigures
from planner.hardware.detect import DetectedGpu

_SUCCESS = 0
_INSUFFICIENT_SIZE = 7
_NOT_AVAILABLE = 2**64 - 1
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_TEMPERATURE_GPU = 0
_UUID_BYTES, _NAME_BYTES = 96, 96

# nvmlClocksEventReasons: bits of why the clocks are lower than they could be.
THROTTLE_REASONS = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_IDLE = 0x001  # a reason too, which is no throttling


class _Memory(Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _MemoryV2(Structure):
    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )


class _Utilization(Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _ProcessV1(Structure):
    _fields_ = (("pid", c_uint), ("used", c_ulonglong))


class _Process(Structure):
    _fields_ = (
        ("pid", c_uint),
        ("used", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


class _LongProcess(Structure):
    """What the headers of the first R535 drivers declare for `_v3`: 32 bytes an entry, not 24."""

    _fields_ = (*_Process._fields_, ("protected", c_ulonglong))


class _Pci(Structure):
    _fields_ = (
        ("legacy_bus_id", c_char * 16),
        ("numbers", c_uint * 5),
        ("bus_id", c_char * 32),
    )


# The question of who computes on a device, newest first, with what an entry of its answer may be.
_PROCESS_QUESTIONS = (
    ("nvmlDeviceGetComputeRunningProcesses_v3", (_Process, _LongProcess)),
    ("nvmlDeviceGetComputeRunningProcesses_v2", (_Process,)),
    ("nvmlDeviceGetComputeRunningProcesses", (_ProcessV1,)),
)


@dataclass(frozen=True)
class NvmlMemory:
    """Bytes. `total` is what programs can have: the driver's own reserve is left out."""

    total: int
    used: int
    free: int


@dataclass(frozen=True)
class NvmlProcess:
    """A process with a context on the device; `used_bytes` is None where the driver hides it."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class NvmlUtilization:
    """Percent of the driver's last sampling period (between a sixth of a second and one, by nvml.h)
    in which some kernel ran, and in which memory was read or written: not how full the card was."""

    gpu_percent: int
    memory_percent: int


@dataclass(frozen=True)
class NvmlDevice:
    """One GPU as the driver knows it."""

    handle: Any
    library: Any

    @property
    def name(self) -> str:
        return self._text("nvmlDeviceGetName", _NAME_BYTES) or "NVIDIA GPU"

    @property
    def uuid(self) -> str | None:
        """`GPU-` and 32 hexadecimal digits with hyphens."""
        return self._text("nvmlDeviceGetUUID", _UUID_BYTES)

    @property
    def pci_bus_id(self) -> str | None:
        """`00000000:01:00.0`, as nvidia-smi prints it."""
        pci = _Pci()
        known = self._call("nvmlDeviceGetPciInfo_v3", byref(pci))
        return pci.bus_id.decode(errors="replace") if known else None

    @property
    def is_split(self) -> bool | None:
        """Whether the card is split into MIG instances: then its memory is not what torch's device
        has, and its name stands for all of them. None where the driver does not say."""
        current, pending = c_uint(), c_uint()
        known = self._call("nvmlDeviceGetMigMode", byref(current), byref(pending))
        return bool(current.value) if known else None

    @property
    def capability(self) -> tuple[int, int] | None:
        major, minor = c_int(), c_int()
        known = self._call("nvmlDeviceGetCudaComputeCapability", byref(major), byref(minor))
        return (major.value, minor.value) if known else None

    @property
    def memory(self) -> NvmlMemory | None:
        """None also where the figures cannot be of any device."""
        found = self._memory()
        if found is None or not 0 < found.total < _NOT_AVAILABLE:
            return None
        return found if max(found.used, found.free) <= found.total else None

    def _memory(self) -> NvmlMemory | None:
        detailed = _MemoryV2(version=ctypes.sizeof(_MemoryV2) | (2 << 24))
        if self._call("nvmlDeviceGetMemoryInfo_v2", byref(detailed)):
            total = detailed.total - detailed.reserved
            return NvmlMemory(total, detailed.used, detailed.free)
        plain = _Memory()
        if self._call("nvmlDeviceGetMemoryInfo", byref(plain)):
            return NvmlMemory(plain.total, plain.used, plain.free)
        return None

    @property
    def processes(self) -> tuple[NvmlProcess, ...] | None:
        """All processes that compute on the device. In a container their pids are the host's."""
        for symbol, kinds in _PROCESS_QUESTIONS:
            function = getattr(self.library, symbol, None)
            answer = None if function is None else self._list_processes(function, kinds)
            if answer is not None:
                return answer
        return None

    def _list_processes(
        self, function: Any, kinds: tuple[type[Structure], ...]
    ) -> tuple[NvmlProcess, ...] | None:
        """Of the forms that an entry may have, the one in which the fewest processes have id 0, as
        none has. The room is for the longest, so that no driver writes beyond it."""
        capacity = 64
        while capacity <= 4096:
            count = c_uint(capacity)
            room = ctypes.create_string_buffer(capacity * ctypes.sizeof(_LongProcess))
            result = function(self.handle, byref(count), room)
            if result == _SUCCESS:
                number = min(count.value, capacity)
                readings = [(kind * number).from_buffer(room) for kind in kinds]
                entries = min(readings, key=lambda read: sum(e.pid == 0 for e in read))
                return tuple(
                    NvmlProcess(e.pid, None if e.used == _NOT_AVAILABLE else e.used)
                    for e in entries
                )
            if result != _INSUFFICIENT_SIZE:
                return None
            capacity *= 4
        return None

    @property
    def sm_mhz(self) -> int | None:
        return self._number("nvmlDeviceGetClockInfo", c_int(_CLOCK_SM))

    @property
    def sm_max_mhz(self) -> int | None:
        return self._number("nvmlDeviceGetMaxClockInfo", c_int(_CLOCK_SM))

    @property
    def memory_mhz(self) -> int | None:
        return self._number("nvmlDeviceGetClockInfo", c_int(_CLOCK_MEMORY))

    @property
    def temperature_c(self) -> int | None:
        return self._number("nvmlDeviceGetTemperature", c_int(_TEMPERATURE_GPU))

    @property
    def power_watts(self) -> float | None:
        milliwatts = self._number("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000

    @property
    def utilization(self) -> NvmlUtilization | None:
        """None also on a card that is split, whose instances the driver does not tell apart."""
        found = _Utilization()
        known = self._call("nvmlDeviceGetUtilizationRates", byref(found))
        return NvmlUtilization(found.gpu, found.memory) if known else None

    @property
    def throttle_reasons(self) -> tuple[str, ...]:
        bits = self._reasons()
        return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)

    def _reasons(self) -> int:
        """The bits of nvmlClocksEventReasons in force; 0 where the driver does not answer."""
        bits = c_ulonglong()
        for symbol in (  # the newer name of the same question first
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        ):
            if self._call(symbol, byref(bits)):
                return bits.value
        return 0

    @property
    def figures(self) -> DriverFigures:
        """Modes, link, power limits and clocks, each None where the card has no such thing."""
        return DriverFigures(
            persistence=self._number("nvmlDeviceGetPersistenceMode"),
            display=self._number("nvmlDeviceGetDisplayActive"),
            compute_mode=self._number("nvmlDeviceGetComputeMode"),
            performance_state=self._number("nvmlDeviceGetPerformanceState"),
            generation=self._number("nvmlDeviceGetCurrPcieLinkGeneration"),
            max_generation=self._number("nvmlDeviceGetMaxPcieLinkGeneration"),
            width=self._number("nvmlDeviceGetCurrPcieLinkWidth"),
            max_width=self._number("nvmlDeviceGetMaxPcieLinkWidth"),
            power_limit=self._number("nvmlDeviceGetEnforcedPowerLimit"),
            default_power_limit=self._number("nvmlDeviceGetPowerManagementDefaultLimit"),
            sm_mhz=self.sm_mhz,
            max_sm_mhz=self.sm_max_mhz,
            temperature=self.temperature_c,
            reasons=self.throttle_reasons,
            idle=bool(self._reasons() & _IDLE),
        )

    def _number(self, symbol: str, *arguments: Any) -> int | None:
        value = c_uint()
        return value.value if self._call(symbol, *arguments, byref(value)) else None

    def _text(self, symbol: str, size: int) -> str | None:
        buffer = ctypes.create_string_buffer(size)
        known = self._call(symbol, buffer, c_uint(size))
        return buffer.value.decode(errors="replace") if known else None

    def _call(self, symbol: str, *arguments: Any) -> bool:
        function = getattr(self.library, symbol, None)
        return function is not None and function(self.handle, *arguments) == _SUCCESS


def count_devices() -> int:
    """How many NVIDIA GPUs the driver has; 0 where there is no driver."""
    library = load_library()
    count = c_uint()
    if library is None or library.nvmlDeviceGetCount_v2(byref(count)) != _SUCCESS:
        return 0
    return count.value


def device_at(index: int) -> NvmlDevice | None:
    """The GPU with this index in PCI order, as nvidia-smi lists them."""
    library = load_library()
    handle = c_void_p()
    if library is None or library.nvmlDeviceGetHandleByIndex_v2(c_uint(index), byref(handle)):
        return None
    return NvmlDevice(handle, library)


def detected_gpus() -> tuple[DetectedGpu, ...]:
    """The GPUs as `planner.hardware.detect` lists them, where nvidia-smi is not installed."""
    found = ((index, device_at(index)) for index in range(count_devices()))
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
        for index, gpu in found
        if gpu is not None
    )


def ask_driver() -> DriverAnswer:
    """The cards, and of each what `planner doctor` else reads from nvidia-smi."""
    gpus = detected_gpus()
    devices = {gpu.uuid: device_at(gpu.index) for gpu in gpus}
    found = {uuid: device.figures for uuid, device in devices.items() if device is not None}
    return DriverAnswer(gpus, found)


def driver_version() -> str | None:
    library = load_library()
    buffer = ctypes.create_string_buffer(_NAME_BYTES)
    if library is None or library.nvmlSystemGetDriverVersion(buffer, c_uint(_NAME_BYTES)):
        return None
    return buffer.value.decode()


@lru_cache(maxsize=1)
def load_library() -> Any | None:
    """The library, initialised; None where there is none or its driver does not answer."""
    for name in ("libnvidia-ml.so.1", "libnvidia-ml.so", "/usr/lib/wsl/lib/libnvidia-ml.so.1"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return library if library.nvmlInit_v2() == _SUCCESS else None
    return None
