"""The precisions that a device computes in at speed, and the refusal of those that it lacks."""

from __future__ import annotations

from planner.core.errors import UnsupportedError, alternatives
from planner.core.schema import DeviceInfo
from planner.machine.hardware.catalogue import recognise_gpu
from planner.machine.hardware.gpu import Gpu

# Matrix units for fp16 came with capability 7.0, for tf32 and bf16 with 8.0 (NVIDIA, CUDA C++
# Programming Guide, table of tensor core types), for fp8 with 8.9 (torch/testing/_internal/
# common_cuda.py, PLATFORM_SUPPORTS_FP8). Pascal (6.x) has none: fp16 moves half the bytes there. On
# AMD torch multiplies no tf32 by itself.
_NEEDS = {
    "fp8": "an NVIDIA GPU of compute capability 8.9 or more",
    "fp16": "compute capability 6.0 or more",
    "bf16": "compute capability 8.0 or more",
    "pure-bf16": "compute capability 8.0 or more",
    "tf32": "an NVIDIA GPU of compute capability 8.0 or more",
}
CPU_PRECISIONS = ("fp32", "bf16")


def precisions_of(vendor: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """What a GPU is better at than at fp32, and fp32."""
    if vendor == "AMD":
        return ("fp32", "bf16", "fp16")
    capability = capability or (0, 0)
    if capability >= (8, 9):
        return ("fp32", "tf32", "bf16", "fp16", "fp8")
    if capability >= (8, 0):
        return ("fp32", "tf32", "bf16", "fp16")
    return ("fp32", "fp16") if capability >= (6, 0) else ("fp32",)


def device_precisions(device: DeviceInfo) -> tuple[str, ...]:
    """What a device computes in at speed."""
    if device.kind == "cpu":
        return CPU_PRECISIONS
    vendor = "AMD" if "amd" in device.name.casefold().split() else "NVIDIA"
    return precisions_of(vendor, device.capability)


def lacks(gpu: Gpu, precision: str) -> bool:
    """Whether `gpu` gains nothing by `precision` (as a setting names it)."""
    offered = precisions_of(gpu.vendor, gpu.capability)
    return precision.removeprefix("pure-") not in offered


def peak_flops(gpu: Gpu, precision: str) -> float | None:
    """The datasheet's dense FLOP/s of matrix products in `precision`; None where there is none, and
    for fp8, of which attention and small layers stay in bf16."""
    peaks = {
        "fp32": gpu.fp32_flops, "tf32": gpu.tf32_flops, "bf16": gpu.bf16_flops,
        "fp16": gpu.fp16_flops,
    }  # fmt: skip
    return peaks.get(precision.removeprefix("pure-"))


def check_precision(gpu: Gpu | None, precision: str) -> None:
    """Raises UnsupportedError where `gpu` lacks `precision`."""
    if gpu is not None and lacks(gpu, precision):
        raise lacking_error(gpu.title, precision, precisions_of(gpu.vendor, gpu.capability))


def check_device_precision(device: DeviceInfo, precision: str) -> None:
    """The same for a GPU that was probed, for which `emit` writes. A CPU's result may be meant for
    any; a GPU that nothing is known of may have all."""
    if device.kind == "cpu":
        return
    name, offered = device.name, device_precisions(device)
    if device.capability is None:
        gpu = recognise_gpu(device.name, device.total_bytes)
        if gpu is None:
            return
        name, offered = gpu.title, precisions_of(gpu.vendor, gpu.capability)
    if precision.removeprefix("pure-") not in offered:
        others = ", or ".join(f"--set precision={other}" for other in reversed(offered))
        raise lacking_error(name, precision, offered, f"Emit with {others} (not measured).")


def lacking_error(
    name: str, precision: str, offered: tuple[str, ...], way_out: str = ""
) -> UnsupportedError:
    return UnsupportedError(
        f"{precision} needs {_NEEDS[precision]}, and {name} supports only "
        f"{alternatives(offered, 'and')}.",
        way_out or f"Choose --precision {alternatives(reversed(offered))}.",
    )
