"""What the device at hand achieves: measured in seconds, kept in the user's cache, read back.

`measure_rates` needs torch, which it imports itself; keeping and reading need none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.core.files import cache_file, write_whole
from planner.core.torch_version import installed_torch
from planner.core.units import GIB
from planner.machine.hardware import all_gpus, recognise_gpu
from planner.machine.hardware.processor import cpu_name
from planner.machine.torch_build import bus_ordered
from planner.throughput.efficiency import BACKWARD_MATMUL_SHARE, WIDE_UNCERTAINTY
from planner.throughput.prediction import MEASURED_UNCERTAINTY, DeviceRates

if TYPE_CHECKING:
    import torch

    from planner.throughput.bench import Bench, Workload

# 2: attention is forward and backward, a CPU's time that of the calling thread.
RATES_FORMAT = 2
# Measured on two cores that 12 processes wanted: in three runs fp32 was 242 to 263 GFLOP/s and bf16
# 884 to 988. With threads that spin bf16 was 140 to 482 (2026-11-21, torch 2.13, AMD EPYC).
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
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
    added = {name: value for name, value in given.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def measure_rates(
    device: str | torch.device = "cuda", workload: Workload | None = None
) -> DeviceRates:
    """The rates of `device` ("cuda", "cuda:1" or "cpu"), measured now, in under 20 s.

    What it allocates (3.33 GiB on an emulated GPU) is given back to torch, not to the driver.
    """
    import torch

    from planner.throughput.bench import CPU_WORKLOAD, CUDA_WORKLOAD, Bench

    where = torch.device(device)
    is_gpu, name = where.type == "cuda", device_name(where)
    bench = Bench(where, workload or (CUDA_WORKLOAD if is_gpu else CPU_WORKLOAD))
    matmul_flops = bench.matmul_flops()
    moving = bench.moving_rates()
    widest = max(matmul_flops, key=lambda dtype: matmul_flops[dtype])
    # Of an H100 they made compiled steps 22% too fast and eager ones 33% too slow.
    known_to = WIDE_UNCERTAINTY if is_gpu else MEASURED_UNCERTAINTY
    return DeviceRates(
        name=name,
        basis=f"measured on {name}, torch {torch.__version__}, {datetime.now(UTC).date()}",
        matmul_flops=matmul_flops,
        bandwidth=moving["copy"],
        kind_share=bench.kind_shares(widest, moving),
        host_seconds=bench.host_seconds(),
        asynchronous=is_gpu,
        uncertainty=known_to,
        other_uncertainty=known_to,
        # Measured forwards: backward's products are shaped otherwise, on a GPU to their cost.
        backward_matmul_share=BACKWARD_MATMUL_SHARE if is_gpu else 1.0,
        compiled_bandwidth=moving["copy"] if is_gpu else None,  # an H200's kernels reach a copy's
        **(_kernels(bench) if is_gpu else _AT_ONCE),
    )


# A CPU computes where it issues: its start is in `host_seconds`, and there is no launch to save.
_AT_ONCE: dict[str, Any] = dict.fromkeys(
    ("kernel_seconds", "graph_kernel_seconds", "launch_seconds", "compiled_launch_seconds",
     "graph_seconds"), 0.0,
)  # fmt: skip


def _kernels(bench: Bench) -> dict[str, Any]:
    """Outside a graph the next kernel is fetched as well: the assumed difference is kept."""
    launched, graphed = bench.kernel_seconds()
    apart = DeviceRates.kernel_seconds - DeviceRates.graph_kernel_seconds
    return {
        "kernel_seconds": graphed + apart, "graph_kernel_seconds": graphed,
        "launch_seconds": launched,
    }  # fmt: skip


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
    what = f"{name}{memory} torch {torch_version or installed_torch() or 'none'}"
    return cache_file("rates", what)


def device_name(device: str | torch.device) -> str:
    """What the driver calls a GPU; for the CPU its model and the threads it computes on."""
    import torch

    where = torch.device(device)
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return cpu_name()
