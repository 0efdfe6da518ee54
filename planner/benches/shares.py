"""What a device could do at best, for the shares that a benchmark reaches of it."""

from __future__ import annotations

from planner.hardware import recognise_gpu
from planner.hardware.precisions import peak_flops
from planner.schema import DeviceInfo
from planner.schema.bench import BenchPrecision, Peaks
from planner.throughput.prediction import DeviceRates

_DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}


def peaks_of(
    device: DeviceInfo, rates: DeviceRates | None, precision: BenchPrecision
) -> Peaks | None:
    """The rates measured on the device, else its datasheet's; None where neither is known."""
    if rates is not None:
        return Peaks(
            flops=rates.matmul_flops.get(_DTYPES[precision]),
            bandwidth=rates.bandwidth,
            basis=rates.basis,
        )
    gpu = recognise_gpu(device.name, device.total_bytes) if device.kind == "cuda" else None
    if gpu is None:
        return None
    return Peaks(
        flops=peak_flops(gpu, precision),
        bandwidth=gpu.bandwidth,
        basis=f"the datasheet of {gpu.title}",
    )
