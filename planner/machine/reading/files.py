"""What the kernel's files say of graphics devices, NUMA nodes and processors.

Paths are those of Linux' documentation: sysfs-bus-pci (vendor, class, numa_node, *_link_*),
sysfs-devices-node (cpulist), cpufreq (scaling_driver). Another system has none of them.
"""

from __future__ import annotations

import os
from pathlib import Path

from planner.machine.host import number_of, text_of
from planner.machine.machine import PciDevice

NVIDIA, AMD = "0x10de", "0x1002"
_DISPLAY_CLASS = "0x03"


def read_pci(root: Path) -> dict[str, PciDevice]:
    """The graphics devices of NVIDIA and AMD by their bus address, `0000:01:00.0`."""
    found = {}
    for folder in folders(root / "sys/bus/pci/devices", "*"):
        vendor = text_of(folder / "vendor")
        if vendor in (NVIDIA, AMD) and text_of(folder / "class").startswith(_DISPLAY_CLASS):
            port = folder.resolve().parent
            found[folder.name] = PciDevice(
                vendor=vendor,
                numa_node=number_of(folder / "numa_node"),
                width=number_of(folder / "current_link_width"),
                max_width=number_of(folder / "max_link_width"),
                port_max_width=number_of(port / "max_link_width"),
            )
    return found


def read_numa_nodes(root: Path) -> dict[str, str]:
    """The CPUs of each NUMA node, as the kernel writes them: {"0": "0-31,64-95"}."""
    found = folders(root / "sys/devices/system/node", "node[0-9]*")
    return {folder.name[4:]: text_of(folder / "cpulist") for folder in found}


def read_device_files(root: Path) -> tuple[str, ...]:
    """The files of GPU drivers in /dev: NVIDIA's, AMD's `kfd`, WSL's `dxg`."""
    names = (path.name for pattern in ("nvidia*", "kfd", "dxg")
             for path in folders(root / "dev", pattern))  # fmt: skip
    return tuple(sorted(names))


def read_kernel_module(root: Path) -> str:
    """The version of NVIDIA's module that the kernel has loaded, as the module tells it."""
    return text_of(root / "proc/driver/nvidia/version").partition("\n")[0]


def read_scaling_driver(root: Path) -> str:
    return text_of(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver")


def affinity_text() -> str:
    """The CPUs on which this process may run, as the kernel writes lists; "" where nobody tells."""
    if not hasattr(os, "sched_getaffinity"):
        return ""
    return as_cpu_list(sorted(os.sched_getaffinity(0)))


def as_cpu_list(cpus: list[int]) -> str:
    """[0, 1, 2, 8] as "0-2,8"."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def folders(folder: Path, pattern: str) -> list[Path]:
    """What lies in a folder, sorted; nothing where it cannot be read."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []
