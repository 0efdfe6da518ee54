"""Which link of the catalogue (`planner estimate --link`) a machine's GPUs are joined by."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.environment.facts import Card, Facts
from planner.environment.machine import Nic

# By the card's name as the driver tells it, of GPUs of which all pairs have NVLink.
_NVLINK = (
    (r"\bV100-SXM", "nvlink-v100"),
    (r"\bA100-SXM|\bA800-SXM", "nvlink-a100"),
    (r"\bH[12]00 PCIe|\bH100 NVL", "nvlink-bridge-h100"),
    (r"\bH[128]00", "nvlink-h100"),
    (r"\bB[23]00", "nvlink-b200"),
    (r"\bA[18]00.*PCI", "nvlink-bridge-a100"),
    (r"\b3090|\bA40\b|\bA6000", "nvlink-bridge-3090"),
)
# GeForce cards have no P2P over PCIe (pull request 22 of tinygrad/open-gpu-kernel-modules).
_WITHOUT_P2P = r"GeForce|TITAN RTX"
# Gbit/s of a card, at least, and the network it is, with RDMA and without.
_RDMA = ((400, "ib-ndr"), (200, "ib-hdr"), (100, "100gbe-rdma"), (25, "25gbe-rdma"))
_TCP = ((100, "100gbe-tcp"), (25, "25gbe-tcp"), (10, "10gbe-tcp"))


@dataclass(frozen=True)
class Proposal:
    """A link as `--link` takes it, and what it was chosen by."""

    link: str
    why: str


def propose_link(facts: Facts, nodes: int = 1) -> Proposal | None:
    """The link between the GPUs that torch can see, and with several machines the network between
    them; None where there is one GPU, or where nothing tells."""
    within = _within(facts)
    if nodes == 1 or within is None:
        return within
    between = _between(facts)
    if between is None:
        return within
    return Proposal(f"{within.link},{between.link}", f"{within.why}; {between.why}")


def has_no_p2p(facts: Facts) -> str:
    """Why the GPUs that torch can see do not read each other's memory, "" where they do or where
    nothing tells."""
    if facts.variables.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        return "NCCL_P2P_DISABLE"
    if facts.variables.get("NCCL_P2P_LEVEL", "") in ("LOC", "0"):
        return "NCCL_P2P_LEVEL"
    peers = facts.among_visible(facts.peers)
    if any(how != "OK" for how in peers.values()):
        return "nvidia-smi topo -p2p r"
    if not peers and all(re.search(_WITHOUT_P2P, card.gpu.name) for card in facts.visible):
        return "GeForce cards have none over PCIe"
    return ""


def _within(facts: Facts) -> Proposal | None:
    cards = facts.visible
    joined = list(facts.among_visible(facts.pairs).values())
    if len(cards) < 2 or not joined:
        return None
    by_nvlink = [how for how in joined if how.startswith("NV")]
    disabled = has_no_p2p(facts).startswith("NCCL_")
    is_pairs_of_a100 = all(re.search(r"\bA[18]00", card.gpu.name) for card in cards)
    # Of other cards that a bridge joins in pairs, a ring passes over the rest too. A100 were timed.
    if by_nvlink and not disabled and (len(by_nvlink) == len(joined) or is_pairs_of_a100):
        return _over_nvlink(cards, by_nvlink[0])
    generation = min((_generation(card) for card in cards), default=0)
    joined_by = f"nvidia-smi topo -m: {', '.join(sorted(set(joined)))}"
    if why := has_no_p2p(facts):
        return Proposal("no-p2p-pcie5" if generation >= 5 else "no-p2p", f"{joined_by}; {why}")
    if generation < 3:
        return None
    return Proposal(f"pcie{min(generation, 5)}", f"{joined_by}; PCIe {generation}")


def _over_nvlink(cards: list[Card], joined_by: str) -> Proposal | None:
    for pattern, link in _NVLINK:
        if all(re.search(pattern, card.gpu.name) for card in cards):
            return Proposal(link, f"nvidia-smi topo -m: {joined_by}")
    return None


def _generation(card: Card) -> int:
    return (card.smi.link.max_generation if card.smi else None) or 0


def _between(facts: Facts) -> Proposal | None:
    """The fastest network cards that are up: those with RDMA, unless NCCL is told to use none."""
    nics = facts.machine.nics
    no_rdma = facts.variables.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    rdma = {name: nic for name, nic in nics.items() if nic.kind != "ethernet" and not no_rdma}
    return _fastest(rdma, _RDMA) or _fastest(
        {name: nic for name, nic in nics.items() if nic.kind == "ethernet"}, _TCP
    )


def _fastest(nics: dict[str, Nic], links: tuple[tuple[int, str], ...]) -> Proposal | None:
    rates = {name: nic.gbits for name, nic in nics.items() if nic.is_up and nic.gbits}
    for least, link in links:
        alike = [name for name, rate in rates.items() if rate >= least]
        if alike:
            count = f"{len(alike)}x" if len(alike) > 1 else ""
            return Proposal(f"{count}{link}", f"{', '.join(alike[:4])}: {rates[alike[0]]:g} Gbit/s")
    return None
