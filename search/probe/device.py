"""The device at hand, asked without touching it: no CUDA context, no torch in this process.

A figure that a driver gives of memory is believed where it agrees with what the caching allocator
knows for certain. In containers the driver may know this process by another id, or by the right one
with 0 bytes; what the whole device's use grew by follows other processes too; and with paging (WSL)
a process may hold more than the device has.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner import __version__
from planner.core.errors import UsageError
from planner.core.schema import DeviceInfo, TrainSetting
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
    """What is taken of a device and what is left of it, in bytes, and by whom.

    Asked by a process without a context, all that is used is others'. On the CPU, `free_bytes` is
    what can be had without swapping, within the limit of the control group.
    """

    total_bytes: int
    used_bytes: int
    free_bytes: int
    holders: tuple[nvml.NvmlProcess, ...] = ()


def choose_device(wanted: str = "auto") -> str:
    """`auto` to "cuda:0" where torch could use a GPU here, else to "cpu"; `cuda` to "cuda:0".

    Raises UsageError for anything but auto, cpu, cuda and cuda:N.
    """
    named = read_device(wanted)
    if named == "auto":
        return "cuda:0" if why_no_gpu() is None else "cpu"
    return named


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


def why_no_segments(device: str) -> str:
    """Why "cuda:N" has no expandable segments, in torch's words; "" where it has, or nobody knows:
    without CUDA's virtual memory management torch fails at the first."""
    index = int(device[5:])
    gpus = _ask_torch(index).gpus
    return gpus[index].segment_error if index < len(gpus) else ""


def check_world(device: str, setting: TrainSetting) -> None:
    """Raises UsageError where this machine has not a GPU for each rank, from `device` on."""
    if device == "cpu" or setting.parallelism == "none":
        return
    if setting.nodes > 1:
        raise UsageError(
            f"a probe reaches the GPUs of this machine, and {setting.nodes} nodes were asked for.",
            "Probe one node's GPUs, and see with 'planner estimate --nodes' what others add.",
        )
    first, there = int(device[5:]), len(_ask_torch(int(device[5:])).gpus)
    if first + setting.world_size > there:
        left = there - first
        raise UsageError(
            f"{setting.world_size} GPUs were asked for from {device} on, and this machine has "
            f"{left} there.",
            f"Ask for at most {left}, or rehearse with as many ranks and --device cpu.",
        )


def describe_device(wanted: str = "auto") -> DeviceInfo:
    """The device as records name it. Raises UsageError where it cannot be used here."""
    device = choose_device(wanted)
    return _describe_cpu() if device == "cpu" else _describe_cuda(int(device[5:]))


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


@lru_cache(maxsize=1)
def _describe_cpu() -> DeviceInfo:
    return DeviceInfo(kind="cpu", name=cpu_name(), total_bytes=_host_memory().total_bytes)


def memory_in_use(device: str) -> MemoryInUse | None:
    """What the processes on `device` ("cpu", "cuda:N") hold; None where the driver does not say."""
    if device == "cpu":
        return _host_memory()
    found = _driver_device(int(device[5:]))
    memory = found.memory if found is not None else None
    if found is None or memory is None:
        return None
    return MemoryInUse(memory.total, memory.used, memory.free, found.processes or ())


def least_free(devices: Sequence[str]) -> MemoryInUse | None:
    """The memory of the device that has least left; None where one does not say."""
    found = [memory_in_use(device) for device in dict.fromkeys(devices)]
    known = [memory for memory in found if memory is not None]
    return min(known, key=lambda m: m.free_bytes) if len(known) == len(found) else None


def nvml_device(device: str) -> nvml.NvmlDevice | None:
    """The driver's handle of "cuda:N", as the worker's environment numbers it; None where cards are
    split, as the driver's figures are then of a whole one and torch's device is an instance."""
    return _nvml_device(int(device[5:]))


def driver_device(device: str) -> nvml.NvmlDevice | None:
    """The driver's handle of "cuda:N", as torch numbers it; None of "cpu", and where the driver's
    figures are not of torch's device."""
    return None if device == "cpu" else _driver_device(int(device[5:]))


def name_card(device: str) -> str | None:
    """Which card "cuda:N" is, and how to train on the same one, where the GPUs here differ: CUDA
    numbers them by speed, and a probe by their bus."""
    if len({gpu.name for gpu in visible_gpus(_nvml_gpus())}) < 2:
        return None
    found = driver_device(device)
    if found is None:
        return None
    return (
        f"The GPUs here differ, and this is of {found.name} ({found.uuid}, PCI "
        f"{found.pci_bus_id}): train on it with CUDA_VISIBLE_DEVICES={found.uuid}."
    )


def worker_environment() -> dict[str, str]:
    """This process's environment for a worker, which imports what this process would.

    GPUs are numbered in PCI order, as nvidia-smi does and as `describe_device` reads them, unless
    the environment says otherwise already.
    """
    environment = torch_build.bus_ordered(os.environ)
    paths = [path or str(Path.cwd()) for path in sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


@lru_cache(maxsize=1)
def _versions(packages: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = {"python": platform.python_version(), "planner": __version__}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch_build.installed_build() not in (None, "cpu"):
        found["cuda"] = str(torch_build.installed_build())
    return tuple(found.items())


@lru_cache(maxsize=1)
def _libraries() -> tuple[tuple[str, str], ...]:
    """The versions of cuDNN and NCCL: told by torch, which decides what it loads."""
    if torch_build.installed_build() in (None, "cpu"):
        return ()
    return tuple(torch_build.ask_torch(worker_environment(), ()).libraries.items())


# Variables that change which kernels run, what they keep or how they are timed: probes under
# another value are of other software. From torch 2.11 on, cuDNN's attention comes first on
# capability 9.0 and 10.x wherever the mask needs no gradient, unless the first of them is set
# (sdp_utils.cpp).
TELLING_VARIABLES = (
    "TORCH_CUDNN_SDPA_DEPRIORITIZED", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
    "CUDA_LAUNCH_BLOCKING",
)  # fmt: skip


def versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """What software a probe runs on: its versions, and what it is told beyond the setting."""
    found = dict(_versions(packages)) | dict(_libraries())
    configured = environment_options(os.environ)
    if configured is not None:
        found[RECORDED_AS] = configured[1]
    return found | {name: os.environ[name] for name in TELLING_VARIABLES if os.environ.get(name)}


def _nvml_device(index: int) -> nvml.NvmlDevice | None:
    """The device torch would call cuda:index: CUDA_VISIBLE_DEVICES renumbers them. None where one
    of them is split: how CUDA numbers instances among cards is not known here."""
    visible = visible_gpus(_nvml_gpus())
    if index >= len(visible) or any(gpu.is_split for gpu in visible):
        return None
    return nvml.device_at(visible[index].index)


def _driver_device(index: int) -> nvml.NvmlDevice | None:
    """The driver's handle of what torch has as cuda:index, by its UUID where torch tells one; None
    where the driver's memory is not that of torch's device."""
    build = _ask_torch(index)
    if index >= len(build.gpus):
        return None
    gpu = build.gpus[index]
    found = _nvml_device(index)
    if found is not None and not _is_named(found, gpu):
        visible = [nvml.device_at(other.index) for other in visible_gpus(_nvml_gpus())]
        found = next((other for other in visible if other and _is_named(other, gpu)), None)
    memory = found.memory if found is not None else None
    return found if memory is None or agree(memory.total, gpu.total_bytes) else None


def _is_named(device: nvml.NvmlDevice, gpu: torch_build.TorchGpu) -> bool:
    """Whether a driver's device has the UUID that torch tells; where one of them tells none, it is
    taken to be so."""
    theirs, ours = (device.uuid or "").casefold(), gpu.uuid.casefold()
    return not theirs or not ours or theirs.removeprefix("gpu-") == ours.removeprefix("gpu-")


@lru_cache(maxsize=1)
def _nvml_gpus() -> tuple[DetectedGpu, ...]:
    return nvml.detected_gpus()


@lru_cache(maxsize=8)
def _ask_torch(index: int) -> torch_build.TorchBuild:
    """What torch says of its devices, and whether it can run on that with `index`."""
    return torch_build.ask_torch(worker_environment(), (index,))


def ask_process(arguments: Sequence[str], deadline_seconds: float) -> dict[str, Any] | None:
    """The JSON object that a Python process prints last; None where it fails or is late.

    What must not happen here, such as using a device, happens there and ends with it.
    """
    try:
        answer = subprocess.run(
            [sys.executable, "-P", *arguments],
            env=worker_environment(),
            capture_output=True,
            timeout=deadline_seconds,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        found = json.loads(answer.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


def _host_memory() -> MemoryInUse:
    total, free = memory_room()
    return MemoryInUse(total, total - free, free)


# What a process holds of a GPU beside the caching allocator's segments is within these: contexts of
# 287 to 667 MB are reported, and kernels that are loaded and recorded graphs add to them.
CONTEXT_LOW_BYTES, CONTEXT_HIGH_BYTES = 100 * MIB, 2 * GIB
# How far NVML's total less its reserve and CUDA's total may lie apart for one device.
SAME_TOTAL_SHARE = 0.05
# What a context may have grown by since it was measured, while others' share is told by difference.
CONTEXT_GROWTH_BYTES = 512 * MIB


@dataclass(frozen=True)
class Reading:
    """One look at a device, in bytes: `reserved` by our caching allocator, `used` by all, `own`
    what the driver counts for our process; None where nobody says."""

    reserved: int
    used: int | None = None
    own: int | None = None


@dataclass(frozen=True)
class Context:
    """What a process holds of the device outside of the caching allocator, and how it is known."""

    num_bytes: int
    source: str


def agree(nvml_total: int, torch_total: int) -> bool:
    """Whether two totals can be of one device. A card split by MIG, or another card, is neither."""
    return abs(nvml_total - torch_total) <= SAME_TOTAL_SHARE * max(nvml_total, torch_total)


def measure_context(used_before: int | None, now: Reading) -> Context:
    """The context just made: by the driver's figure for this process, else by what the device's
    use grew by; where neither is plausible, as assumed in estimates."""
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
    """What the driver gave up to this process at its peak: peak reserved, and what lies beside.

    What lies beside grows with the kernels that are loaded, so it is read again; a figure for the
    process itself counts whatever it is, a difference only where it is plausible.
    """
    beside = [context.num_bytes]
    own, grown = _own_beside(now), _grown_beside(used_before, now)
    if own is not None:
        beside.append(own)
    elif grown is not None and grown <= CONTEXT_HIGH_BYTES:
        beside.append(grown)
    return peak_reserved + max(beside)


def others_bytes(context: Context, now: Reading) -> int | None:
    """What other processes hold, at least; None where nobody says what is used."""
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
