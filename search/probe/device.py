"""The device at hand, described without touching it: no CUDA context, no torch in this process. And
what a process takes of it, from figures that may be wrong.

A driver's figure of memory is believed where it agrees with what the caching allocator knows for
certain. In containers the driver may know this process by another id, or by the right one with 0
bytes; the growth of the whole device's use includes other processes; and with paging (WSL) a
process may hold more than the device has.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner import __version__
from planner.core.errors import UsageError
from planner.core.schema import DeviceInfo, TrainSetting
from planner.core.torch_version import installed_version
from planner.core.units import GIB, MIB
from planner.machine import nvml, torch_build
from planner.machine.emulated import is_emulated
from planner.machine.hardware.gpu import DetectedGpu, read_device, visible_gpus
from planner.machine.hardware.overheads import CONTEXT_BYTES
from planner.machine.host import cpu_name, memory_room
from planner.memory.allocator_config import RECORDED_AS, environment_options

# Packages whose versions decide what a probe measures.
_PACKAGES = ("torch", "triton", "timm", "torchvision", "transformers")


@dataclass(frozen=True)
class MemoryInUse:
    """The memory of a device that is used and that is free, in bytes. A process without a CUDA
    context uses none itself. On the CPU, `free_bytes` are available without swapping, within the
    limit of the control group."""

    total_bytes: int
    used_bytes: int
    free_bytes: int


def choose_device(name: str = "auto") -> str:
    """`auto` to "cuda:0" where torch could use a GPU here, else to "cpu"; `cuda` to "cuda:0".

    Raises UsageError for anything but auto, cpu, cuda and cuda:N.
    """
    device = read_device(name)
    if device == "auto":
        return "cuda:0" if why_no_gpu() is None else "cpu"
    return device


def why_no_gpu(index: int = 0) -> str | None:
    """Why `cuda:index` cannot be probed here, in a clause; None where torch has run on it.

    A driver that answers is not enough: torch may be built for a newer one, or without code for the
    card. So torch is asked, once, in a process that ends.
    """
    build = torch_build.installed_build()
    if build is None:
        return "torch is not installed"
    if build == "cpu":
        return "this torch is built for the CPU only"
    return torch_build.why_not_usable(_ask_torch(index), index)


def device_index(device: str) -> int:
    """N of "cuda:N"."""
    return int(device.removeprefix("cuda:"))


def why_no_segments(device: str) -> str:
    """Why "cuda:N" has no expandable segments, in torch's words; "" where it has them, or that is
    not known. Without CUDA's virtual memory management torch fails at the first segment."""
    index = device_index(device)
    gpus = _ask_torch(index).gpus
    return gpus[index].segment_error if index < len(gpus) else ""


def check_world(device: str, setting: TrainSetting) -> None:
    """Raises UsageError unless this machine has a GPU for each rank, from `device` on."""
    if device == "cpu" or setting.parallelism == "none":
        return
    if setting.nodes > 1:
        raise UsageError(
            f"a probe reaches the GPUs of this machine, and {setting.nodes} nodes were asked for.",
            "Probe one node's GPUs, and see with 'planner estimate --nodes' what others add.",
        )
    first = device_index(device)
    left = len(_ask_torch(first).gpus) - first
    if setting.world_size > left:
        raise UsageError(
            f"{setting.world_size} GPUs were asked for from {device} on, and this machine has "
            f"{left} there.",
            f"Ask for at most {left}, or rehearse with as many ranks and --device cpu.",
        )


def describe_device(name: str = "auto") -> DeviceInfo:
    """The device as records describe it. Raises UsageError where it cannot be used here."""
    device = choose_device(name)
    if device == "cpu":
        return DeviceInfo(kind="cpu", name=cpu_name(), total_bytes=memory_room()[0])
    return _describe_cuda(device_index(device))


@lru_cache(maxsize=8)
def _describe_cuda(index: int) -> DeviceInfo:
    why = why_no_gpu(index)
    if why is not None:
        raise UsageError(f"cuda:{index} cannot be used: {why}.", "Pass --device cpu.")
    gpu = _ask_torch(index).gpus[index]
    device = _driver_device(index)
    return DeviceInfo(
        kind="cuda",
        name=gpu.name,
        total_bytes=gpu.total_bytes,
        capability=gpu.capability,
        driver=nvml.driver_version(),
        uuid=(device.uuid if device is not None else None) or gpu.uuid or None,
        emulated=is_emulated(),
    )


def memory_in_use(device: str) -> MemoryInUse | None:
    """The memory in use on `device` ("cpu", "cuda:N"); None where the driver does not say."""
    if device == "cpu":
        total, free = memory_room()
        return MemoryInUse(total, total - free, free)
    handle = driver_device(device)
    memory = handle.memory if handle is not None else None
    return None if memory is None else MemoryInUse(memory.total, memory.used, memory.free)


def least_free(devices: Sequence[str]) -> MemoryInUse | None:
    """The memory in use on the device with the least free; None where that of one is not known."""
    readings = [memory_in_use(device) for device in dict.fromkeys(devices)]
    known = [memory for memory in readings if memory is not None]
    return min(known, key=lambda m: m.free_bytes) if len(known) == len(readings) else None


def nvml_device(device: str) -> nvml.NvmlDevice | None:
    """The driver's handle of "cuda:N", as the worker's environment numbers it; None where cards are
    split: the driver's figures are then a whole card's, and torch's device is an instance."""
    return _nvml_device(device_index(device))


def driver_device(device: str) -> nvml.NvmlDevice | None:
    """The driver's handle of "cuda:N", as torch numbers it; None for "cpu", and where the driver's
    figures are not those of torch's device."""
    return None if device == "cpu" else _driver_device(device_index(device))


def name_card(device: str) -> str | None:
    """Where the GPUs here differ, which card "cuda:N" is and how to train on the same one: CUDA
    numbers cards by speed, and a probe by their bus."""
    if len({gpu.name for gpu in visible_gpus(_nvml_gpus())}) < 2:
        return None
    card = driver_device(device)
    if card is None:
        return None
    return (
        f"The GPUs here differ, and this is of {card.name} ({card.uuid}, PCI "
        f"{card.pci_bus_id}): train on it with CUDA_VISIBLE_DEVICES={card.uuid}."
    )


def worker_environment() -> dict[str, str]:
    """The environment of a worker: this process's, with its paths of imports. GPUs are numbered in
    PCI order, as nvidia-smi and `describe_device` number them, unless the environment says
    otherwise."""
    environment = torch_build.bus_ordered(os.environ)
    paths = [path or str(Path.cwd()) for path in sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


@lru_cache(maxsize=1)
def _releases() -> Mapping[str, str]:
    """The versions of python, the planner and packages; and of CUDA, cuDNN and NCCL, from torch,
    which decides what it loads."""
    releases = {"python": platform.python_version(), "planner": __version__}
    releases |= {name: found for name in _PACKAGES if (found := installed_version(name))}
    if torch_build.installed_build() not in (None, "cpu"):
        releases["cuda"] = str(torch_build.installed_build())
        releases |= torch_build.ask_torch(worker_environment(), ()).libraries
    return releases


# Variables that change which kernels run, what they keep or how they are timed: probes under
# another value are of other software. From torch 2.11 on, cuDNN's attention comes first on
# capability 9.0 and 10.x wherever the mask needs no gradient, unless the first of them is set
# (sdp_utils.cpp).
TELLING_VARIABLES = (
    "TORCH_CUDNN_SDPA_DEPRIORITIZED", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
    "CUDA_LAUNCH_BLOCKING",
)  # fmt: skip


def versions() -> dict[str, str]:
    """The software that a probe runs on: its versions, and the variables that change what it
    does."""
    software = {**_releases()}
    configured = environment_options(os.environ)
    if configured is not None:
        software[RECORDED_AS] = configured[1]
    return software | {name: os.environ[name] for name in TELLING_VARIABLES if os.environ.get(name)}


def _nvml_device(index: int) -> nvml.NvmlDevice | None:
    """The device that torch would call cuda:index, as CUDA_VISIBLE_DEVICES renumbers them. None
    where a card is split: how CUDA numbers instances among cards is not known here."""
    visible = visible_gpus(_nvml_gpus())
    if index >= len(visible) or any(gpu.is_split for gpu in visible):
        return None
    return nvml.device_at(visible[index].index)


def _driver_device(index: int) -> nvml.NvmlDevice | None:
    """The driver's handle of torch's cuda:index, by its UUID where torch tells one; None where the
    driver's total of memory is not that of torch's device."""
    build = _ask_torch(index)
    if index >= len(build.gpus):
        return None
    gpu = build.gpus[index]
    device = _nvml_device(index)
    if device is not None and not _may_be(device, gpu):
        visible = [nvml.device_at(other.index) for other in visible_gpus(_nvml_gpus())]
        device = next((other for other in visible if other and _may_be(other, gpu)), None)
    memory = device.memory if device is not None else None
    return device if memory is None or agree(memory.total, gpu.total_bytes) else None


def _may_be(device: nvml.NvmlDevice, gpu: torch_build.TorchGpu) -> bool:
    """Whether the driver's device and torch's have one UUID, or one of them has none."""
    uuids = (device.uuid or "").casefold(), gpu.uuid.casefold()
    return not all(uuids) or len({uuid.removeprefix("gpu-") for uuid in uuids}) == 1


@lru_cache(maxsize=1)
def _nvml_gpus() -> tuple[DetectedGpu, ...]:
    return nvml.detected_gpus()


@lru_cache(maxsize=8)
def _ask_torch(index: int) -> torch_build.TorchBuild:
    """What torch says of its devices, and whether it can run on the one with `index`."""
    return torch_build.ask_torch(worker_environment(), (index,))


def ask_process(arguments: Sequence[str], deadline_seconds: float) -> dict[str, Any] | None:
    """The JSON object that a Python process prints last; None where it fails or is late. What must
    not happen in this process, such as using a device, happens there and ends with it."""
    try:
        answer = subprocess.run(
            [sys.executable, "-P", *arguments],
            env=worker_environment(),
            capture_output=True,
            timeout=deadline_seconds,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        value = json.loads(answer.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return None
    return value if isinstance(value, dict) else None


# Beside the caching allocator's segments a process holds so much of a GPU: contexts of 287 to 667
# MB are reported, and loaded kernels and recorded graphs add to them.
CONTEXT_LOW_BYTES, CONTEXT_HIGH_BYTES = 100 * MIB, 2 * GIB
# The share by which NVML's total less its reserve and CUDA's total may differ for one device.
SAME_TOTAL_SHARE = 0.05
# A context may have grown by so much since it was measured, where others' share is a difference.
CONTEXT_GROWTH_BYTES = 512 * MIB


@dataclass(frozen=True)
class Reading:
    """One reading of a device, in bytes: `reserved` by our caching allocator, `used` by all
    processes, `own` as the driver counts our process; None where it is not known."""

    reserved: int
    used: int | None = None
    own: int | None = None


@dataclass(frozen=True)
class Context:
    """The bytes that a process holds outside of the caching allocator, and how that is known."""

    num_bytes: int
    source: str


def agree(nvml_total: int, torch_total: int) -> bool:
    """Whether two totals can be those of one device, which a split card's are not."""
    return abs(nvml_total - torch_total) <= SAME_TOTAL_SHARE * max(nvml_total, torch_total)


def measure_context(used_before: int | None, now: Reading) -> Context:
    """The context that was just made: the driver's figure for this process, else the growth of the
    device's use; where neither is plausible, the figure that estimates assume."""
    figures = (
        ("the driver's figure for this process", _own_beside(now)),
        ("what the device's use grew by", _grown_beside(used_before, now)),
    )
    for source, num_bytes in figures:
        if num_bytes is not None and CONTEXT_LOW_BYTES <= num_bytes <= CONTEXT_HIGH_BYTES:
            return Context(num_bytes, source)
    return Context(CONTEXT_BYTES, "assumed: the driver's figures are not plausible")


def process_bytes(
    context: Context, peak_reserved: int, used_before: int | None, now: Reading
) -> int:
    """The device's bytes that this process took at its peak: the peak of reserved bytes, and what
    lies beside them. That grows with the kernels that are loaded, so that it is read again; a
    figure of the process itself always counts, a difference only where it is plausible."""
    beside = [context.num_bytes]
    own, grown = _own_beside(now), _grown_beside(used_before, now)
    if own is not None:
        beside.append(own)
    elif grown is not None and grown <= CONTEXT_HIGH_BYTES:
        beside.append(grown)
    return peak_reserved + max(beside)


def others_bytes(context: Context, now: Reading) -> int | None:
    """The fewest bytes that other processes hold; None where it is not known what is used."""
    if now.used is None:
        return None
    beside = _own_beside(now)
    if beside is None:
        beside = context.num_bytes + CONTEXT_GROWTH_BYTES
    return max(0, now.used - now.reserved - beside)


def _own_beside(now: Reading) -> int | None:
    """The driver's figure for us less what is reserved; None where it is less than that, or more
    than is used of the device by all."""
    if now.own is None or now.own <= now.reserved:
        return None
    if now.used is not None and now.own > now.used:
        return None
    return now.own - now.reserved


def _grown_beside(used_before: int | None, now: Reading) -> int | None:
    if used_before is None or now.used is None:
        return None
    return now.used - used_before - now.reserved
