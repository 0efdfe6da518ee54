"""What the device at hand achieves: measured in seconds, kept in the user's cache, read back.

`measure_rates` needs torch, which it imports itself; keeping and reading need none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from planner.core import torch_version
from planner.core.files import cache_file, write_whole
from planner.core.units import GIB
from planner.machine.hardware import all_gpus, recognise_gpu
from planner.machine.hardware.processor import cpu_name
from planner.machine.torch_build import bus_ordered
from planner.throughput.bench import Bench, Workload
from planner.throughput.efficiency import BACKWARD_MATMUL_SHARE, WIDE_UNCERTAINTY
from planner.throughput.prediction import MEASURED_UNCERTAINTY, DeviceRates

if TYPE_CHECKING:
    import torch

# 2: attention is forward and backward, a CPU's time that of the calling thread.
RATES_FORMAT = 2
# What is copied or normalised leaves a B200's L2 cache (126 MiB); all of it fits an 8 GiB card.
CUDA_WORKLOAD = Workload(
    rows=65536, channels=512, copy_bytes=512 * 1024**2, images=128, side=56, host_layers=64,
    sample_seconds=0.03,
)  # fmt: skip
# Measured on two cores that 12 processes wanted: in three runs fp32 was 242 to 263 GFLOP/s and bf16
# 884 to 988. With threads that spin bf16 was 140 to 482 (2026-11-21, torch 2.13, AMD EPYC).
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
# Samples so short that some find all threads at work: where one is kept waiting by other processes,
# those that wait for it spin, on their own time.
CPU_WORKLOAD = Workload(
    rows=1024, channels=256, copy_bytes=64 * 1024**2, images=4, side=56, host_layers=16,
    sample_seconds=0.001,
)  # fmt: skip


# Cards run above the datasheet's clock where power and heat allow it: how far is assumed.
_MARGIN = 1.25
_PRECISIONS = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16",
               "float8": "fp8"}  # fmt: skip


@contextmanager
def measuring_environment() -> Iterator[None]:
    """The environment that a process which measures should load torch in, unless it is set already:
    threads that wait for others sleep, where they would spin on their own time, and GPUs are
    numbered by their bus."""
    given = {**_WAITING, **bus_ordered({})}
    added = [name for name in given if name not in os.environ]
    os.environ.update({name: given[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def measure_rates(
    device: str | torch.device = "cuda", workload: Workload | None = None
) -> DeviceRates:
    """The rates of `device` ("cuda", "cuda:1" or "cpu"), measured now, in under 20 s.

    What it allocates (under 2 GiB on a GPU) is given back to the allocator, not to the driver.
    """
    import torch

    where = torch.device(device)
    bench = Bench(where, workload or (CUDA_WORKLOAD if where.type == "cuda" else CPU_WORKLOAD))
    matmul_flops = bench.matmul_flops()
    moving = bench.moving_rates()
    widest = max(matmul_flops, key=lambda dtype: matmul_flops[dtype])
    # Of an H100 they made compiled steps 22% too fast and eager ones 33% too slow.
    known_to = WIDE_UNCERTAINTY if where.type == "cuda" else MEASURED_UNCERTAINTY
    rates = DeviceRates(
        name=device_name(where),
        basis="",
        matmul_flops=matmul_flops,
        bandwidth=moving["copy"],
        kind_share=bench.kind_shares(widest, moving),
        host_seconds=bench.host_seconds(),
        asynchronous=where.type == "cuda",
        uncertainty=known_to,
        other_uncertainty=known_to,
        # Measured forwards: backward's products are shaped otherwise, on a GPU to their cost.
        backward_matmul_share=BACKWARD_MATMUL_SHARE if where.type == "cuda" else 1.0,
    )
    if where.type == "cuda":
        graphed = bench.graphed_kernel_seconds()
        # Outside a graph the next kernel is fetched as well: the assumed difference is kept.
        apart = rates.kernel_seconds - rates.graph_kernel_seconds
        rates = replace(
            rates, graph_kernel_seconds=graphed, kernel_seconds=graphed + apart,
            launch_seconds=bench.launch_seconds(),
            compiled_bandwidth=rates.bandwidth,  # an H200's compiled kernels reach a copy's rate
        )  # fmt: skip
    else:
        # A CPU computes where it issues: its start is in `host_seconds` already, and there is no
        # launch to save.
        rates = replace(
            rates, kernel_seconds=0.0, graph_kernel_seconds=0.0, launch_seconds=0.0,
            compiled_launch_seconds=0.0, graph_seconds=0.0,
        )  # fmt: skip
    day = datetime.now(UTC).date().isoformat()
    return replace(rates, basis=f"measured on {rates.name}, torch {torch.__version__}, {day}")


def why_impossible(rates: DeviceRates, memory_bytes: int | None = None) -> str | None:
    """Why no device can be as fast as `rates` say, in a sentence; None where one can: the card of
    that name in the catalogue, else the fastest card there is in it."""
    gpu = recognise_gpu(rates.name, memory_bytes)
    cards = all_gpus() if gpu is None else (gpu,)
    whose = "no card that is known" if gpu is None else f"no {gpu.title}"
    figures = [(rates.bandwidth, max(card.bandwidth for card in cards), 1e9, "GB/s")]
    for dtype, rate in rates.matmul_flops.items():
        precision = _PRECISIONS[dtype]
        most = max(getattr(card, f"{precision}_flops") or card.fp32_flops for card in cards)
        figures.append((rate, most, 1e12, f"TFLOP/s in {precision}"))
    for rate, most, scale, unit in figures:
        if not rate <= _MARGIN * most:
            return (
                f"measured nonsense: {rate / scale:,.0f} {unit}, where {whose} has more than "
                f"{most / scale:,.0f}; the clock or the device is not real"
            )
    return None


def save_rates(rates: DeviceRates, memory_bytes: int | None = None) -> Path:
    """Keep `rates` for `load_rates`: one JSON file per device and torch version, of a GPU per size
    of its memory too. Raises OSError where the cache cannot be written."""
    path = rates_path(rates.name, memory_bytes=memory_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"format": RATES_FORMAT, "rates": asdict(rates)}
    write_whole(path, json.dumps(data, indent=1))
    return path


def load_rates(
    name: str, torch_version: str | None = None, memory_bytes: int | None = None
) -> DeviceRates | None:
    """The rates kept for the device called `name` (`device_name`) with so much memory under this
    torch version; None where none were measured, or what was kept is of another format, damaged,
    or impossible.
    """
    try:
        path = rates_path(name, torch_version, memory_bytes)
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != RATES_FORMAT:
            return None
        rates = DeviceRates(**data["rates"])
        return rates if why_impossible(rates, memory_bytes) is None else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def rates_path(
    name: str, torch_version: str | None = None, memory_bytes: int | None = None
) -> Path:
    """The file that holds the rates of a device under a torch version (this one by default). Cards
    of one name and another memory are other cards; it counts in whole GiB, however it was read."""
    memory = "" if memory_bytes is None else f" {round(memory_bytes / GIB)} gib"
    what = f"{name}{memory} torch {torch_version or installed_torch()}"
    return cache_file("rates", what)


def device_name(device: str | torch.device) -> str:
    """What the driver calls a GPU; for the CPU its model and the threads it computes on."""
    import torch

    where = torch.device(device)
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return cpu_name()


def installed_torch() -> str:
    """Its version; "none" where it is not installed."""
    return torch_version.installed_torch() or "none"
