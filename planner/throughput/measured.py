"""What the device at hand achieves, measured by `bench.py`: kept in the user's cache, read back."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from planner.core.files import cache_file, write_whole
from planner.core.torch_version import installed_torch
from planner.core.units import GIB
from planner.machine.hardware import all_gpus, recognise_gpu
from planner.throughput.prediction import DeviceRates

# What is kept: the format (3: a host's seconds are scaled by its chain of small layers), and the
# rates.
_KEPT = TypeAdapter(tuple[Literal[3], DeviceRates])
# Cards run above the datasheet's clock where power and heat allow it: how far is assumed.
_MARGIN = 1.25
_PRECISIONS = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16",
               "float8": "fp8"}  # fmt: skip


def why_impossible(rates: DeviceRates, memory_bytes: int | None = None) -> str | None:
    """Why no device can be as fast as `rates` say, in a sentence; None where one can: the card of
    that name in the catalogue, else the fastest card there is in it."""
    gpu = recognise_gpu(rates.name, memory_bytes)
    cards = all_gpus() if gpu is None else (gpu,)
    flops = {f"{_PRECISIONS[dtype]}_flops": rate for dtype, rate in rates.matmul_flops.items()}
    for what, rate in {"bandwidth": rates.bandwidth, **flops}.items():
        most = max(getattr(card, what) or card.fp32_flops for card in cards)
        if not rate <= _MARGIN * most:
            said = f"{what.removesuffix('_flops')} {rate:.3g}/s"
            has = f"{gpu.title if gpu else 'any card'} has {most:.3g}"
            return f"measured nonsense: {said}, where {has}; the clock or the device is not real"
    return None


def save_rates(rates: DeviceRates, memory_bytes: int | None = None) -> Path:
    """Keep `rates` for `load_rates`: one JSON file per device and torch version, of a GPU per size
    of its memory too. Raises OSError where the cache cannot be written."""
    path = rates_path(rates.name, memory_bytes=memory_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _KEPT.dump_json((3, rates), indent=1).decode())
    return path


def load_rates(
    name: str, torch_version: str | None = None, memory_bytes: int | None = None
) -> DeviceRates | None:
    """The rates kept for the device called `name` with so much memory under this
    torch version; None where none were measured, or what was kept is of another format, damaged,
    or impossible.
    """
    try:
        _, rates = _KEPT.validate_json(rates_path(name, torch_version, memory_bytes).read_bytes())
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
