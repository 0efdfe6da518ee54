"""What the kernel's files say of network cards: sysfs-class-net and sysfs-class-infiniband of
Linux' documentation. Another system has none of them."""

from __future__ import annotations

from pathlib import Path

from planner.machine.host import number_of, text_of
from planner.machine.machine import Nic
from planner.machine.reading.files import folders


def read_nics(root: Path) -> dict[str, Nic]:
    """The cards that are hardware, by the kernel's names: Ethernet, and those that do RDMA."""
    found = {}
    for folder in folders(root / "sys/class/net", "*"):
        if (folder / "device").exists():  # bridges, tunnels and the loopback have none
            megabits = number_of(folder / "speed")  # -1 where the cable is out
            found[folder.name] = Nic(
                kind="ethernet",
                gbits=megabits / 1000 if megabits and megabits > 0 else None,
                is_up=text_of(folder / "operstate") == "up",
                numa_node=number_of(folder / "device/numa_node"),
            )
    for folder in folders(root / "sys/class/infiniband", "*"):
        port = folder / "ports/1"
        rate = text_of(port / "rate").split()  # "100 Gb/sec (4X EDR)"
        found[folder.name] = Nic(
            kind="infiniband" if text_of(port / "link_layer") == "InfiniBand" else "roce",
            gbits=float(rate[0]) if rate and rate[0].replace(".", "", 1).isdigit() else None,
            is_up="ACTIVE" in text_of(port / "state"),
            numa_node=number_of(folder / "device/numa_node"),
        )
    return found
