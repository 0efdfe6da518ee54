"""How GPUs are joined, what slows them down, and which link of the catalogue that is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.machine.doctor import check_machine
from planner.machine.findings.finding import Finding
from planner.machine.machine import Machine, Nic
from planner.machine.reading.network import read_nics
from planner.machine.topology import NvLinks, parse_nvlinks, parse_peers, parse_topology
from tests.environment.recorded import FOLDER, recorded

ETHERNET = Nic("ethernet", 10.0, True, 0)
FAST = Nic("ethernet", 100.0, True, 0)
ROCE = Nic("roce", 100.0, True, 0)


def findings(machine: Machine) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_machine(machine).findings}


def test_no_p2p_says_how_the_cards_are_joined_and_why() -> None:
    card = findings(recorded("rtx4090-no-p2p"))["link.no-p2p"]
    assert "(pairs: 6, joined by PHB)" in card.message
    assert "GNS: the GPU does not support it" in card.evidence
    assert "IOMMU" not in card.next_step
    board = findings(recorded("pcie-two-sockets"))["link.no-p2p"]
    assert "joined by PIX, PXB, SYS" in board.message
    assert "ACS" in board.next_step


def test_a_nvlink_that_is_down_is_counted() -> None:
    found = findings(recorded("v100-link-down"))["link.nvlink-down"]
    assert "GPU3: 2 of 6 inactive" in found.evidence
    assert "4 of 6 links" in found.cost


@pytest.mark.parametrize(
    ("nics", "variables", "name"),
    [
        ({"a": ETHERNET}, {}, "link.few-nics"),
        ({f"m{n}": ROCE for n in range(8)}, {}, None),
        ({"a": ETHERNET, **{f"m{n}": ROCE for n in range(8)}}, {}, None),
        ({f"m{n}": ROCE for n in range(8)}, {"NCCL_IB_DISABLE": "1"}, "settings.nccl-ib"),
        ({}, {"NCCL_SHM_DISABLE": "1"}, "settings.nccl-shm"),
        ({}, {"NCCL_SOCKET_IFNAME": "eth9"}, None),
        ({f"e{n}": FAST for n in range(8)}, {"NCCL_SOCKET_IFNAME": "x"},
         "settings.nccl-interface"),
        ({f"e{n}": FAST for n in range(8)}, {"NCCL_SOCKET_IFNAME": "=e"},
         "settings.nccl-interface"),
        ({f"e{n}": FAST for n in range(8)}, {"NCCL_SOCKET_IFNAME": "^x"}, None),
        ({"s": ETHERNET, **{f"e{n}": FAST for n in range(8)}}, {"NCCL_SOCKET_IFNAME": "s"},
         "settings.nccl-interface"),
        ({"s": ETHERNET, **{f"e{n}": FAST for n in range(8)}}, {"NCCL_SOCKET_IFNAME": "e"}, None),
    ],
)  # fmt: skip
def test_the_network(nics: dict[str, Nic], variables: dict[str, str], name: str | None) -> None:
    machine = replace(recorded("dgx-a100"), nics=nics, variables=variables)
    assert list(findings(machine)) == ([name] if name else [])


def test_what_nvidia_smi_prints() -> None:
    assert parse_peers((FOLDER / "rtx4090-no-p2p/peers.txt").read_text())[1, 3] == "GNS"
    links = parse_nvlinks((FOLDER / "v100-link-down/nvlink.txt").read_text())
    assert links[3] == NvLinks(4, 2, 25.781)
    assert links[0] == NvLinks(6, 0, 25.781)
    assert len(parse_topology((FOLDER / "dgx-a100/topology.txt").read_text())) == 8 * 7 / 2
    for broken in ("", "GPU0", "GPU 0: x\n Link 0", "NVML: error"):
        assert (parse_peers(broken), parse_nvlinks(broken)) == ({}, {})
    spaces = (
        "        GPU0    GPU1    NIC0\nGPU0     X      NV4     SYS\nGPU1    NV4      X      PIX\n"
    )
    assert parse_topology(spaces) == {(0, 1): "NV4"}, "as people paste it"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_network_cards_are_read(tmp_path: Path) -> None:
    net, ib = "sys/class/net", "sys/class/infiniband"
    write(tmp_path, {
        f"{net}/eno1/speed": "25000\n", f"{net}/eno1/operstate": "up\n",
        f"{net}/eno1/device/numa_node": "1\n",
        f"{net}/eno2/speed": "-1\n", f"{net}/eno2/operstate": "down\n",
        f"{net}/eno2/device/numa_node": "-1\n",
        f"{net}/docker0/speed": "10000\n", f"{net}/docker0/operstate": "up\n",
        f"{ib}/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        f"{ib}/mlx5_0/ports/1/state": "4: ACTIVE\n",
        f"{ib}/mlx5_0/ports/1/link_layer": "InfiniBand\n",
        f"{ib}/mlx5_1/ports/1/rate": "100 Gb/sec (4X EDR)\n",
        f"{ib}/mlx5_1/ports/1/state": "1: DOWN\n",
        f"{ib}/mlx5_1/ports/1/link_layer": "Ethernet\n",
    })  # fmt: skip
    assert read_nics(tmp_path) == {
        "eno1": Nic("ethernet", 25.0, True, 1),
        "eno2": Nic("ethernet", None, False, -1),
        "mlx5_0": Nic("infiniband", 400.0, True),
        "mlx5_1": Nic("roce", 100.0, False),
    }
    assert read_nics(tmp_path / "none") == {}
