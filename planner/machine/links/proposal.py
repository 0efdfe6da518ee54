"""Which link of the catalogue (`planner estimate --link`) a machine's GPUs are joined by."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.machine.facts import Card, Facts

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


@dataclass(frozen=True)
class Proposal:
    """A link as `--link` takes it, and what it was chosen by."""

    link: str
    why: str


def has_no_p2p(facts: Facts) -> str:
    """Why the GPUs that torch can see do not read each other's memory, "" where they do or where
    nothing tells."""
    if facts.is_set("NCCL_P2P_DISABLE"):
        return "NCCL_P2P_DISABLE"
    if facts.variables.get("NCCL_P2P_LEVEL", "") in ("LOC", "0"):
        return "NCCL_P2P_LEVEL"
    peers = facts.among_visible(facts.peers)
    if any(how != "OK" for how in peers.values()):
        return "nvidia-smi topo -p2p r"
    if not peers and all(re.search(_WITHOUT_P2P, card.gpu.name) for card in facts.visible):
        return "GeForce cards have none over PCIe"
    return ""


def propose_link(facts: Facts) -> Proposal | None:
    """The link between the GPUs that torch can see; None where there is one GPU, or where nothing
    tells."""
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
    links = [card.smi.link if card.smi else None for card in cards]
    generation = min((link.max_generation if link else None) or 0 for link in links)
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
