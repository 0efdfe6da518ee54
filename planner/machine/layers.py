"""A machine in lines, layer by layer: what is shown of one, and what is compared of several.

A line is about what lasts. Memory in use, clocks and temperatures change all the time: findings
judge them, and no line shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.core.units import format_bytes
from planner.machine.cuda_support import as_text
from planner.machine.facts import Card, Facts, cpus_of
from planner.machine.findings.finding import LAYERS, Layer

# What a difference matters for.
SPEED, MEMORY, BOTH, NEITHER = "speed", "memory", "speed, memory", ""


@dataclass(frozen=True)
class Line:
    """One thing known of a machine; `matters_for` says what two machines that differ in it do."""

    layer: Layer
    name: str
    value: str
    matters_for: str


def describe(facts: Facts) -> list[Line]:
    """All that is known, from the driver up. What is unknown has no line."""
    lines = [*_driver(facts), *_cards(facts), *_torch(facts), *_libraries(facts),
             *_settings(facts), *_container(facts), *_host(facts)]  # fmt: skip
    return [line for line in lines if line.value]


def _driver(facts: Facts) -> Iterator[Line]:
    yield Line("driver", "driver", facts.driver, SPEED)
    yield Line("driver", "CUDA of the driver", facts.driver_cuda, SPEED)


def _cards(facts: Facts) -> Iterator[Line]:
    for number, card in enumerate(facts.cards):
        yield from _card(f"GPU {number}", card)
    for pair, how in facts.pairs.items():
        peer = facts.peers.get(pair, "OK")
        p2p = "" if peer == "OK" else f", no P2P ({peer})"
        yield Line("link", f"GPU {pair[0]} to {pair[1]}", f"{how}{p2p}", SPEED)
    for name, nic in facts.machine.nics.items():
        rate = f"{nic.gbits:g} Gbit/s" if nic.gbits else ""
        yield Line("link", name, f"{nic.kind} {rate if nic.is_up else 'down'}".strip(), SPEED)


def _card(where: str, card: Card) -> Iterator[Line]:
    gpu = card.gpu
    yield Line("card", where, gpu.name, BOTH)
    size = format_bytes(gpu.total_bytes) if gpu.total_bytes else ""
    yield Line("card", f"{where} memory", size, MEMORY)
    capability = as_text(card.capability) if card.capability else ""
    yield Line("card", f"{where} capability", capability, SPEED)
    if card.smi is None:
        return
    smi, link = card.smi, card.smi.link
    yield Line("card", f"{where} ECC", _on(smi.ecc.enabled), MEMORY)
    yield Line("card", f"{where} MIG", _on(smi.mig) if smi.mig else "", BOTH)
    yield Line("card", f"{where} compute mode", smi.compute_mode, NEITHER)
    yield Line("card", f"{where} persistence", _on(smi.persistence), NEITHER)
    yield Line("card", f"{where} display", "attached" if smi.has_display else "", MEMORY)
    power = f"{smi.power_limit:g} W" if smi.power_limit else ""
    yield Line("card", f"{where} power limit", power, SPEED)
    most = f"{smi.max_sm_mhz} MHz" if smi.max_sm_mhz else ""
    yield Line("card", f"{where} highest clock", most, SPEED)
    if link.width and link.max_width:
        text = f"PCIe {link.max_generation or '?'}, {link.width} of {link.max_width} lanes"
        yield Line("link", where, text, SPEED)
    if card.pci and card.pci.numa_node is not None and card.pci.numa_node >= 0:
        yield Line("link", f"{where} NUMA node", str(card.pci.numa_node), SPEED)


def _torch(facts: Facts) -> Iterator[Line]:
    torch = facts.torch
    yield Line("torch", "torch", torch.version, BOTH)
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else ""
    yield Line("torch", "built for", build or ("the CPU" if torch.version else ""), BOTH)
    yield Line("torch", "kernels for", ", ".join(torch.arch_list), SPEED)
    for name, value in torch.switches.items():
        yield Line("torch", name, value, SPEED)
    yield Line("torch", "allocator", torch.allocator, MEMORY)
    yield Line("torch", "Python", facts.machine.system.get("python", ""), SPEED)


def _libraries(facts: Facts) -> Iterator[Line]:
    titles = {"cudnn": "cuDNN", "nccl": "NCCL", "cublas": "cuBLAS"}
    for name, version in facts.torch.libraries.items():
        yield Line("libraries", titles[name], version, BOTH)
    for name, version in facts.machine.versions.items():
        if name != "torch":
            yield Line("libraries", name, version, BOTH if "triton" in name else SPEED)


def _settings(facts: Facts) -> Iterator[Line]:
    for name, value in facts.variables.items():
        if name not in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_BUILD_ID"):
            memory = "ALLOC" in name or "WORKSPACE" in name or "LOADING" in name
            yield Line("settings", name, value, BOTH if memory else SPEED)


def _container(facts: Facts) -> Iterator[Line]:
    yield Line("container", "kind", facts.container or "none", NEITHER)
    shared = facts.host.shared_memory_bytes
    yield Line("container", "/dev/shm", format_bytes(shared) if shared else "", SPEED)


def _host(facts: Facts) -> Iterator[Line]:
    host, system = facts.host, facts.machine.system
    yield Line("host", "system", system.get("description", ""), SPEED)
    yield Line("host", "processors", f"{host.usable_cpus} of {host.num_cpus}", SPEED)
    yield Line("host", "CPU quota", f"{host.quota_cpus:g}" if host.quota_cpus else "", SPEED)
    yield Line("host", "governor", host.governor or "", SPEED)
    memory = host.memory_limit_bytes or host.memory_bytes
    yield Line("host", "memory", format_bytes(memory) if memory else "", MEMORY)
    nodes = facts.machine.numa_nodes
    if len(nodes) > 1:
        sizes = ", ".join(str(len(cpus_of(cpus))) for cpus in nodes.values())
        yield Line("host", "NUMA nodes", f"{len(nodes)} (CPUs: {sizes})", SPEED)


def _on(flag: bool | None) -> str:
    return "" if flag is None else "on" if flag else "off"


@dataclass(frozen=True)
class Difference:
    """A line in which machines differ: each machine's value, "" where it has none."""

    layer: Layer
    name: str
    values: tuple[str, ...]
    matters_for: str


def compare(machines: Mapping[str, Facts]) -> list[Difference]:
    """What differs between machines, layer by layer; `machines` maps a title to its facts."""
    tables = [{(line.layer, line.name): line for line in describe(f)} for f in machines.values()]
    known = {key: line.matters_for for table in tables for key, line in table.items()}
    found = []
    for (layer, name), matters_for in known.items():
        lines = [table.get((layer, name)) for table in tables]
        values = tuple(line.value if line else "" for line in lines)
        if len(set(values)) > 1:
            found.append(Difference(layer, name, values, matters_for))
    return sorted(found, key=lambda difference: LAYERS.index(difference.layer))
