"""What the device at hand achieves: measured in seconds, kept in the user's cache, read back.

`measure_rates` needs torch, which it imports itself; keeping and reading need none.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter

from planner.core.files import cache_file, write_whole
from planner.core.torch_version import installed_torch
from planner.core.units import GIB
from planner.machine.hardware import all_gpus, recognise_gpu
from planner.machine.hardware.processor import cpu_name
from planner.throughput.efficiency import BACKWARD_MATMUL_SHARE, WIDE_UNCERTAINTY
from planner.throughput.prediction import MEASURED_UNCERTAINTY, DeviceRates

if TYPE_CHECKING:
    import torch

    from planner.throughput.bench import Workload

# What is kept: the format (2: attention is forward and backward, a CPU's time that of the calling
# thread), and the rates.
_KEPT = TypeAdapter(tuple[Literal[2], DeviceRates])
# Cards run above the datasheet's clock where power and heat allow it: how far is assumed.
_MARGIN = 1.25
_PRECISIONS = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16",
               "float8": "fp8"}  # fmt: skip


def measure_rates(
    device: str | torch.device = "cuda", workload: Workload | None = None
) -> DeviceRates:
    """The rates of `device` ("cuda", "cuda:1" or "cpu"), measured now, in under 20 s.

    What it allocates (3.33 GiB on an emulated GPU) is given back to torch, not to the driver.
    """
    import torch

    from planner.throughput.bench import CPU_WORKLOAD, CUDA_WORKLOAD, Bench

    where = torch.device(device)
    is_gpu = where.type == "cuda"
    name = torch.cuda.get_device_name(where) if is_gpu else cpu_name()  # as its driver says it
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
        **bench.kernel_seconds(),
    )


def why_impossible(rates: DeviceRates, memory_bytes: int | None = None) -> str | None:
    """Why no device can be as fast as `rates` say, in a sentence; None where one can: the card of
    that name in the catalogue, else the fastest card there is in it."""
    gpu = recognise_gpu(rates.name, memory_bytes)
    cards = all_gpus() if gpu is None else (gpu,)
    most = {"bandwidth": max(card.bandwidth for card in cards)}
    for precision in set(_PRECISIONS.values()):
        flops = f"{precision}_flops"
        most[precision] = max(getattr(card, flops) or card.fp32_flops for card in cards)
    reached = {_PRECISIONS[dtype]: rate for dtype, rate in rates.matmul_flops.items()}
    for what, rate in {"bandwidth": rates.bandwidth, **reached}.items():
        if not rate <= _MARGIN * most[what]:
            return (
                f"measured nonsense: {what} {rate:.3g}/s, where {gpu.title if gpu else 'any card'} "
                f"has {most[what]:.3g}; the clock or the device is not real"
            )
    return None


def save_rates(rates: DeviceRates, memory_bytes: int | None = None) -> Path:
    """Keep `rates` for `load_rates`: one JSON file per device and torch version, of a GPU per size
    of its memory too. Raises OSError where the cache cannot be written."""
    path = rates_path(rates.name, memory_bytes=memory_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _KEPT.dump_json((2, rates), indent=1).decode())
    return path


def load_rates(
    name: str, torch_version: str | None = None, memory_bytes: int | None = None
) -> DeviceRates | None:
    """The rates kept for the device called `name` with so much memory under this
    torch version; None where none were measured, or what was kept is of another format, damaged,
    or impossible.
    """
    try:
        kept = rates_path(name, torch_version, memory_bytes).read_bytes()
        _, rates = _KEPT.validate_json(kept)
    except (OSError, ValueError):
        return None
    return rates if why_impossible(rates, memory_bytes) is None else None


def rates_path(
    name: str, torch_version: str | None = None, memory_bytes: int | None = None
) -> Path:
    """The file that holds the rates of a device under a torch version (this one by default). Cards
    of one name and another memory are other cards; it counts in whole GiB, however it was read."""
    memory = "" if memory_bytes is None else f" {round(memory_bytes / GIB)} gib"
    what = f"{name}{memory} torch {torch_version or installed_torch() or 'none'}"
    return cache_file("rates", what)
