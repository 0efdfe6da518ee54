"""What slows several GPUs down: no P2P between them, NVLinks that are down, the network.

Rates are bus bandwidths of an all-reduce (nccl-tests), quoted with their source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from planner.machine.cuda_support import parse_version
from planner.machine.facts import Facts, names
from planner.machine.findings.finding import UNKNOWN_COST, Finding
from planner.machine.topology import P2P_REASONS

_WITHOUT_P2P_COST = (
    "copies pass through the host's memory: four RTX 4090 sum at 13 GB/s without P2P and at 26 "
    "with it (tinygrad/open-gpu-kernel-modules#22, #36)"
)


def judge_peers(facts: Facts) -> Iterator[Finding]:
    """Nothing where torch can see only one GPU."""
    if len(facts.visible) < 2:
        return
    yield from _p2p(facts)
    yield from _nvlinks(facts)
    yield from _far(facts)
    yield from _mixed(facts)
    yield from _variables(facts)
    yield from _network(facts)


def _pairs_text(pairs: list[tuple[int, int]]) -> str:
    return names([f"GPU{a} and GPU{b}" for a, b in pairs])


def _p2p(facts: Facts) -> Iterator[Finding]:
    without = {p: how for p, how in facts.among_visible(facts.peers).items() if how != "OK"}
    if not without:
        return
    reasons = sorted(set(without.values()))
    joined = sorted({facts.pairs[pair] for pair in without if pair in facts.pairs})
    way = f", joined by {', '.join(joined)}" if joined else ""
    why = "; ".join(f"{reason}: {P2P_REASONS[reason]}" for reason in reasons)
    if reasons == ["GNS"]:
        step = "Nothing with NVIDIA's driver: let fewer gradients cross (accumulate, no_sync)."
    else:
        step = (
            "Turn the IOMMU (VT-d, AMD-Vi) and ACS off in the board's settings, or the driver's "
            "key back on; see sudo lspci -vvv | grep ACSCtl (NCCL, Troubleshooting)."
        )
    yield Finding(
        "warning", "link", "link.no-p2p",
        f"GPUs cannot read each other's memory (pairs: {len(without)}{way})",
        f"nvidia-smi topo -p2p r: {_pairs_text(list(without))}: {why}",
        _WITHOUT_P2P_COST, step,
    )  # fmt: skip


def _nvlinks(facts: Facts) -> Iterator[Finding]:
    cards = {card.gpu.index: card for card in facts.visible}
    found = {index: links for index, links in facts.nvlinks.items() if index in cards}
    broken = {index: links for index, links in found.items() if links.up and links.down}
    if broken:
        told = names([f"GPU{i}: {n.down} of {n.up + n.down} inactive" for i, n in broken.items()])
        worst = min(broken.values(), key=lambda links: links.up / (links.up + links.down))
        yield Finding(
            "warning", "link", "link.nvlink-down",
            f"some NVLinks are down on {names([cards[i].title for i in broken])}",
            f"nvidia-smi nvlink --status: {told}",
            f"{worst.up} of {worst.up + worst.down} links carry what all should: all-reduce is "
            "slower in proportion, or NCCL takes another way",
            "Seat bridge or card again, reset the GPUs, and look for Xid 74 in dmesg.",
        )  # fmt: skip
    unjoined = [index for index, links in found.items() if links.down and not links.up]
    if unjoined:
        yield Finding(
            "note", "link", "link.no-bridge",
            "cards have NVLink and no bridge joins them: "
            f"{names([cards[i].title for i in unjoined])}",
            "nvidia-smi nvlink --status: every link is inactive",
            "two RTX 3090 reach 48 GB/s over a bridge by NCCL's model (src/graph/topo.h), and 24 "
            "over PCIe 4",
            "Put a bridge between them, or start the fabric manager (nvidia-fabricmanager) where "
            "the machine has NVSwitch.",
        )  # fmt: skip


def _far(facts: Facts) -> Iterator[Finding]:
    far = [pair for pair, how in facts.among_visible(facts.pairs).items() if how == "SYS"]
    if far:
        yield Finding(
            "note", "link", "link.far-peers",
            f"GPUs reach each other only across the sockets (pairs: {len(far)})",
            f"nvidia-smi topo -m: SYS between {_pairs_text(far)}",
            "three A100 across the sockets sum at 20 GB/s, two joined by NVLink at 208 "
            "(NVIDIA/nccl-tests#178); one GPU is not concerned",
            "For a training on two GPUs choose a pair that is nearer (nvidia-smi topo -m).",
        )  # fmt: skip


def _mixed(facts: Facts) -> Iterator[Finding]:
    kinds = list(dict.fromkeys(card.gpu.name for card in facts.visible))
    if len(kinds) > 1:
        yield Finding(
            "note", "link", "link.mixed-cards",
            f"GPUs of {len(kinds)} kinds would train together: {names(kinds)}",
            "nvidia-smi",
            "every step waits for the slowest, and the batch is that of the smallest memory",
            "Choose cards that are alike by CUDA_VISIBLE_DEVICES.",
        )  # fmt: skip


def _variables(facts: Facts) -> Iterator[Finding]:
    level = facts.variables.get("NCCL_P2P_LEVEL", "")
    if facts.is_set("NCCL_P2P_DISABLE") or level in ("LOC", "0"):
        name = "NCCL_P2P_DISABLE" if facts.is_set("NCCL_P2P_DISABLE") else "NCCL_P2P_LEVEL"
        yield Finding(
            "warning", "settings", "settings.nccl-p2p",
            f"{name}={facts.variables[name]} keeps NCCL from P2P, NVLink included",
            "environment", _WITHOUT_P2P_COST,
            f"Unset {name}; it hides a fault of the board (ACS, IOMMU) that is better mended.",
        )  # fmt: skip
    if facts.is_set("NCCL_SHM_DISABLE"):
        yield Finding(
            "warning", "settings", "settings.nccl-shm",
            "NCCL_SHM_DISABLE keeps NCCL from shared memory: GPUs without P2P use the network",
            "environment", UNKNOWN_COST, "Unset NCCL_SHM_DISABLE.",
        )  # fmt: skip


def _network(facts: Facts) -> Iterator[Finding]:
    """What matters between machines."""
    nics = facts.machine.nics
    rdma = {name: nic for name, nic in nics.items() if nic.kind != "ethernet" and nic.is_up}
    if rdma and facts.is_set("NCCL_IB_DISABLE"):
        yield Finding(
            "warning", "settings", "settings.nccl-ib",
            f"NCCL_IB_DISABLE keeps NCCL from {names(list(rdma))}",
            f"environment; /sys/class/infiniband: {names(list(rdma))} active",
            "between machines NCCL uses TCP: at 100 Gbit/s 4 to 6 GB/s, not 12 (NVIDIA/nccl#450, "
            "NVIDIA/nccl-tests#29)",
            "Unset NCCL_IB_DISABLE.",
        )  # fmt: skip
    if rdma:
        yield from _gpudirect(facts, list(rdma))
    yield from _interface(facts)
    used = [nic for nic in rdma.values() if nic.gbits] or [
        nic for nic in nics.values() if nic.is_up and nic.gbits
    ]
    best = max((nic.gbits or 0 for nic in used), default=0)
    count = sum(nic.gbits == best for nic in used)
    if best and 2 * count <= len(facts.visible):
        yield Finding(
            "note", "link", "link.few-nics",
            f"{len(facts.visible)} GPUs share {count} network card{'s' if count > 1 else ''} of "
            f"{best:g} Gbit/s",
            "/sys/class/infiniband, /sys/class/net",
            f"between machines all GPUs together sum at most {count * best / 8:.3g} GB/s; one "
            "machine is not concerned",
            "",
        )  # fmt: skip


def _gpudirect(facts: Facts, cards: list[str]) -> Iterator[Finding]:
    """Two ways for RDMA to reach a GPU's memory (NVIDIA, GPU Operator, "GPUDirect RDMA": the module
    nvidia_peermem, or DMA-BUF with the open kernel modules and Linux 5.12)."""
    machine = facts.machine
    if machine.peermem is not False or not machine.kernel_module or not facts.cards:
        return
    release = parse_version(machine.system.get("kernel", ""))
    if "Open Kernel Module" in machine.kernel_module and release >= (5, 12):
        return
    yield Finding(
        "note", "link", "link.no-gpudirect",
        f"{names(cards)} cannot read a GPU's memory: data for other machines are copied to the "
        "host's first",
        "/sys/module has neither nvidia_peermem nor nv_peer_mem, and DMA-BUF takes NVIDIA's open "
        f"kernel modules and Linux 5.12: this is {machine.system.get('kernel')}, "
        f"{machine.kernel_module}",
        "between machines only; unknown: it was not measured",
        "sudo modprobe nvidia-peermem, or install the driver with its open kernel modules.",
    )  # fmt: skip


def _interface(facts: Facts) -> Iterator[Finding]:
    """NCCL_SOCKET_IFNAME: prefixes, or with = whole names, with ^ those not to use (NCCL's user
    guide, Environment Variables)."""
    value = facts.variables.get("NCCL_SOCKET_IFNAME", "")
    known = {name: nic for name, nic in facts.machine.nics.items() if nic.kind == "ethernet"}
    if not value or value.startswith("^") or not known:
        return
    exact, parts = value.startswith("="), [p for p in value.lstrip("=").split(",") if p]
    hit = [n for n in known if any(n == p if exact else n.startswith(p) for p in parts)]
    if not hit:
        virtual = any(re.match(r"bond|team|br|vlan|docker|lo|ib", part) for part in parts)
        if not virtual:  # these are not hardware, and so were not read
            yield Finding(
                "warning", "settings", "settings.nccl-interface",
                f"NCCL_SOCKET_IFNAME={value} names no network card of this machine",
                f"environment; /sys/class/net has {names(list(known))}",
                "NCCL does not start where it finds no interface",
                "Name one of them, or unset NCCL_SOCKET_IFNAME.",
            )  # fmt: skip
        return
    best = max(known.values(), key=lambda nic: nic.gbits or 0)
    mine = max((known[name].gbits or 0 for name in hit), default=0)
    rates = [f"{name} {nic.gbits or 0:g} Gbit/s" for name, nic in known.items()]
    if best.is_up and mine and (best.gbits or 0) > mine:
        yield Finding(
            "warning", "settings", "settings.nccl-interface",
            f"NCCL_SOCKET_IFNAME={value} takes a card of {mine:g} Gbit/s, and one of "
            f"{best.gbits:g} is up",
            f"environment; /sys/class/net: {names(rates)}",
            f"over TCP between machines at most {mine / 8:.3g} GB/s",
            "Name the faster one, or unset NCCL_SOCKET_IFNAME.",
        )  # fmt: skip
