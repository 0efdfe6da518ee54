"""A GPU: its memory and its rates, with the source of each figure."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from planner.core.errors import UsageError, shorten

# PCIe 4.0 x16, bytes/s one way (16 GT/s, 128 bits of 130 are data): taken where a device's link to
# the host is not known.
ASSUMED_LINK = 31.5e9


@dataclass(frozen=True)
class Gpu:
    """One device. Memory in bytes, rates in FLOP/s (dense, a multiply-add is two) and bytes/s.

    `memory_bytes` is what the driver reports as total, or the marketed size read as GiB where no
    report was found (`sources["memory_bytes"]` says which). A rate is None where the device has no
    such unit. `sources` maps a field to where its figure comes from. `capability` is CUDA's, None
    where the device is not NVIDIA's. `device_names` are what its driver calls it. `fp32_flops` is
    that of a matmul at full precision (on AMD the matrix units'). `memory_type` is "HBM2e",
    "GDDR6X" and the like, "" where it is not known. `link_bandwidth` is that to the host, one way;
    None where it is not known.
    """

    name: str
    title: str
    vendor: str
    architecture: str
    capability: tuple[int, int] | None
    memory_bytes: int
    bandwidth: float
    fp32_flops: float
    tf32_flops: float | None
    bf16_flops: float | None
    fp16_flops: float | None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    device_names: tuple[str, ...] = ()
    num_sms: int | None = None
    boost_mhz: int | None = None
    memory_type: str = ""
    link_bandwidth: float | None = None

    @property
    def threads_per_sm(self) -> int:
        """The most that reside on one multiprocessor (CUDA C++ Programming Guide, technical
        specifications per compute capability); 2,048 where it is not NVIDIA's."""
        if self.capability is None:
            return 2048
        if self.capability == (7, 5):
            return 1024
        return 1536 if self.capability in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1)) else 2048

    @property
    def fp8_flops(self) -> float | None:
        """Twice bf16's from capability 8.9 on, dense and with FP32 accumulation: H100 2,000 TFLOP/s
        against 1,000 (NVIDIA Hopper Architecture In-Depth, table 3), L40S 733 against 362 (its
        datasheet), RTX 4090 330 against 165 (Ada GPU Architecture whitepaper v2.02, appendix A),
        RTX 5090 419 against 209.5 (RTX Blackwell whitepaper, table 3), B200 4,500 against 2,250
        (glennklockwood.com, B200). Of others it is assumed."""
        if self.bf16_flops is None or (self.capability or (0, 0)) < (8, 9):
            return None
        return 2 * self.bf16_flops

    @property
    def has_bf16(self) -> bool:
        """Whether autocast to bf16 is worth having: the device has bf16 matrix units."""
        return self.bf16_flops is not None


# A GPU as the driver lists it, which of them CUDA sees, and how people name a device.


@dataclass(frozen=True)
class DetectedGpu:
    """One device as the driver lists it. `used_bytes` is what all processes hold on it now;
    sizes are None where the driver does not say (devices that share the host's memory)."""

    index: int
    name: str
    uuid: str
    total_bytes: int | None
    used_bytes: int | None
    driver: str
    capability: tuple[int, int] | None
    is_split: bool = False  # into MIG instances
    pci_bus_id: str = ""


def read_device(text: str) -> str:
    """A device as people write it (`CUDA`, `cpu:0`) as "auto", "cpu" or "cuda:N". Raises
    UsageError."""
    match = re.fullmatch(r"(auto)|(cpu)(?::0)?|cuda(?::([0-9]{1,3}))?", text.strip().lower())
    if match is None:
        raise UsageError(
            f"unknown device {shorten(text)}.", "Devices are auto, cpu, cuda:0, cuda:1 …"
        )
    return match.group(1) or match.group(2) or f"cuda:{int(match.group(3) or 0)}"


def visible_gpus(
    gpus: Sequence[DetectedGpu], environ: Mapping[str, str] = os.environ
) -> list[DetectedGpu]:
    """Those of `gpus` that CUDA_VISIBLE_DEVICES leaves visible, in its order: `cuda:0` first.

    Indices are read in the driver's order, which is CUDA's own with CUDA_DEVICE_ORDER=PCI_BUS_ID
    and on machines whose GPUs are all alike. As in CUDA, the first unknown entry ends the list.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(gpus)
    chosen: list[DetectedGpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        hits = [g for g in gpus if entry == str(g.index) or (entry and g.uuid.startswith(entry))]
        if len(hits) != 1 or hits[0] in chosen:
            break
        chosen.append(hits[0])
    return chosen


# The processor of this machine, as records and kept rates name it: no torch.


def cpu_name() -> str:
    """The processor and the threads that computing on it takes: "AMD EPYC, 2 threads"."""
    # In the order in which torch heeds them (aten/src/ATen/ParallelCommon.cpp).
    said = (os.environ.get(name, "") for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"))
    count = next((int(threads) for threads in said if threads.isdigit()), usable_cores())
    return f"{_cpu_model()}, {count} thread{'' if count == 1 else 's'}"


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine() or "CPU"


# Reasons for low clocks that make a measurement untrustworthy, by the driver's names for them.

# Heat and supply, of nvmlClocksEventReasons (nvml.h) without its prefix; the gravest that can be
# named comes first. A power cap is none of them: large matrix work meets it on every card, and so
# will the training itself.
DISTURBING_REASONS = {
    "hw_thermal_slowdown": "the hardware has at least halved the clocks because of heat",
    "hw_power_brake_slowdown": "the power supply asked the hardware to at least halve the clocks",
    "hw_slowdown": "the hardware has at least halved the clocks",
    "sw_thermal_slowdown": "the driver has lowered the clocks because of heat",
}
