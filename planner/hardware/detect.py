"""The GPUs of this machine, asked of the driver: no torch, and no CUDA context on the device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from planner.errors import UsageError, shorten
from planner.units import MIB

_FIELDS = ("index", "name", "uuid", "memory.total", "memory.used", "driver_version")
# What older drivers do not know: `compute_cap` came with 510. Asked in whole, then less.
_LATER_FIELDS = ("compute_cap", "mig.mode.current", "pci.bus_id")
_DEADLINE_SECONDS = 20  # a cold driver without persistence mode takes several seconds to answer

Query = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class DetectedGpu:
    """One device as `nvidia-smi` reports it. `used_bytes` is what all processes hold on it now;
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


def detect_gpus(query: Query | None = None) -> list[DetectedGpu]:
    """The NVIDIA GPUs of this machine in the driver's order, [] where there is none.

    `query` runs `nvidia-smi` for some fields and returns its CSV, or None where it failed.
    """
    ask = query or query_nvidia_smi
    for count in (3, 1, 0):
        text = ask((*_FIELDS, *_LATER_FIELDS[:count]))
        if text is not None:
            return parse_gpus(text)
    return []


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


def query_nvidia_smi(fields: Sequence[str]) -> str | None:
    """`nvidia-smi`'s CSV for `fields`, one line per GPU; None where it is missing or fails."""
    import subprocess  # milliseconds that only a detection should pay

    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def parse_gpus(text: str) -> list[DetectedGpu]:
    """`nvidia-smi`'s CSV (sizes in MiB) as devices; lines of another form are passed over."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [_gpu(row) for row in rows if len(row) >= len(_FIELDS) and row[0].isdigit()]


def _gpu(row: Sequence[str]) -> DetectedGpu:
    index, name, uuid, total, used, driver = row[: len(_FIELDS)]
    capability, split, bus_id = [*row[len(_FIELDS) :], "", "", ""][: len(_LATER_FIELDS)]
    return DetectedGpu(
        index=int(index),
        name=name,
        uuid=uuid,
        total_bytes=_mebibytes(total),
        used_bytes=_mebibytes(used),
        driver=driver,
        capability=_capability(capability),
        is_split=split == "Enabled",
        pci_bus_id=bus_id,
    )


def _mebibytes(cell: str) -> int | None:
    return int(cell) * MIB if cell.isdigit() else None


def _capability(cell: str) -> tuple[int, int] | None:
    major, _, minor = cell.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
