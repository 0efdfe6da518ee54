"""A GPU as the driver lists it, which of them CUDA sees, and how people name a device."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.core.errors import UsageError, shorten


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
