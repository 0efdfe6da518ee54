"""How the cards are connected to the host: PCIe's generation and lanes, and NUMA nodes.

A card at rest lowers the generation of its link (nvidia-smi's help: "may be reduced when the GPU is
not in use"), so that a low one is judged only while the card works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.core.units import format_seconds
from planner.machine.facts import Card, Facts, cpus_of
from planner.machine.findings.finding import (
    EXAMPLE_BATCH,
    EXAMPLE_BATCH_BYTES,
    UNKNOWN_COST,
    Finding,
)

# Bytes/s of one lane in one direction: transfers/s × the code's share / 8 bits (PCI Express Base
# Specification: 2.5 and 5 GT/s with 8b/10b, 8 to 32 GT/s with 128b/130b, 64 GT/s in flits of which
# 242 of 256 bytes are data).
_LANE_RATES = {1: 2.5e8, 2: 5e8, 3: 9.85e8, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def judge_links(facts: Facts) -> Iterator[Finding]:
    for card in facts.cards:
        for finding in (*_width(card), *_generation(card), *_numa(facts, card)):
            yield replace(finding, subject=card.title)


def transfer_seconds(generation: int | None, lanes: int | None) -> float | None:
    """How long `EXAMPLE_BATCH` takes over the link, at best; None where the link is not known."""
    rate = _LANE_RATES.get(generation or 0)
    return EXAMPLE_BATCH_BYTES / (rate * lanes) if rate and lanes else None


def _width(card: Card) -> Iterator[Finding]:
    link = card.smi.link if card.smi else None
    now = (link.width if link else None) or (card.pci.width if card.pci else None)
    most = (link.max_width if link else None) or (card.pci.max_width if card.pci else None)
    if not now or not most or now >= most:
        return
    slot = card.pci.port_max_width if card.pci else None
    generation = link.max_generation if link else None
    evidence = f"{card.told_by}: link width {now} of {most} lanes"
    cost = _cost((generation, now), (generation, most))
    if slot:
        evidence += f"; the slot's max_link_width in /sys/bus/pci is {slot}"
    if slot and slot <= now:
        yield Finding(
            "warning", "link", "link.slot",
            f"{card.title} can use {most} PCIe lanes, and its slot has {slot}",
            evidence, cost, "Move the card to a slot of 16 lanes.",
        )  # fmt: skip
        return
    if card.smi and card.smi.is_virtual:
        yield Finding(
            "note", "link", "link.width",
            f"{card.title} runs on {now} of {most} PCIe lanes, as this virtual machine was given "
            "it",
            f"{evidence}; virtualization_mode of the card", cost,
            "Nothing to be done from here; another kind of rented machine may have more.",
        )  # fmt: skip
        return
    yield Finding(
        "warning", "link", "link.width",
        f"{card.title} runs on {now} of {most} PCIe lanes",
        evidence, cost,
        "Seat the card again, try it without a riser, and see whether the board shares the slot's "
        "lanes with another slot or disk.",
    )  # fmt: skip


def _cost(now: tuple[int | None, int | None], most: tuple[int | None, int | None]) -> str:
    """What (generation, lanes) cost against those that are possible."""
    slow, fast = transfer_seconds(*now), transfer_seconds(*most)
    if slow is None or fast is None:
        return "copies to the card take longer in proportion; the step itself does not"
    over = f" over PCIe {now[0]}" if now[0] == most[0] else ""
    return (
        f"{EXAMPLE_BATCH} is copied in {format_seconds(slow)} at best{over}, not "
        f"{format_seconds(fast)}; the step itself is no slower"
    )


def _generation(card: Card) -> Iterator[Finding]:
    if card.smi is None:
        return
    link = card.smi.link
    card_most, slot_most = link.card_generation, link.host_generation
    if card_most and slot_most and slot_most < card_most:
        yield Finding(
            "note", "link", "link.host-generation",
            f"{card.title} could use PCIe {card_most}, and its slot is of PCIe {slot_most}",
            f"{card.told_by}: max_device_link_gen, max_host_link_gen",
            _cost((slot_most, link.width), (card_most, link.width)), "",
        )  # fmt: skip
    now, most = link.generation, link.max_generation
    if now and most and now < most and not card.smi.is_resting:
        yield Finding(
            "warning", "link", "link.generation",
            f"{card.title} works over PCIe {now}, and PCIe {most} is possible",
            f"{card.told_by}: current_link_gen {now}, max_link_gen {most}, state "
            f"P{card.smi.performance_state}",
            _cost((now, link.width), (most, link.width)),
            "Look while it trains again; if it stays, see the board's PCIe settings and the riser.",
        )  # fmt: skip


def _numa(facts: Facts, card: Card) -> Iterator[Finding]:
    node = card.pci.numa_node if card.pci else None
    nodes = facts.machine.numa_nodes
    near, mine = cpus_of(nodes.get(str(node), "")), cpus_of(facts.machine.affinity)
    if len(nodes) < 2 or not near or not mine or card.position is None:
        return
    evidence = (
        f"/sys/bus/pci: numa_node {node} (CPUs {nodes[str(node)]}); affinity of this process: "
        f"CPUs {facts.machine.affinity}"
    )
    if not near & mine:
        yield Finding(
            "warning", "link", "numa.far",
            f"{card.title} is at NUMA node {node}, and this process may run on none of its CPUs",
            evidence,
            "every copy and every launch crosses between the sockets; how much is unknown",
            f"numactl --cpunodebind={node} --membind={node} COMMAND; under a scheduler, ask it to "
            "bind to the GPU.",
        )  # fmt: skip
    elif not mine <= near:
        yield Finding(
            "note", "link", "numa.unbound",
            f"{card.title} is at NUMA node {node}, and this process may run on other nodes as well",
            evidence,
            UNKNOWN_COST,
            f"Try numactl --cpunodebind={node} --membind={node} COMMAND and compare.",
        )  # fmt: skip
