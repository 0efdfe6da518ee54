"""What a machine's raw answers mean: cards with all that is known of them, the driver, the host.

Pure: a `Machine` in, `Facts` out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.machine.hardware.catalogue import recognise_gpu
from planner.machine.hardware.detect import DetectedGpu, visible_gpus
from planner.machine.host import Host
from planner.machine.machine import Machine, PciDevice
from planner.machine.smi import SmiCard, SmiLog, card_from_figures, parse_smi
from planner.machine.topology import NvLinks, parse_nvlinks, parse_peers, parse_topology
from planner.machine.torch_build import TorchBuild


@dataclass(frozen=True)
class Card:
    """A GPU: what detection says, `smi` what the driver says (None where it says nothing) and
    `told_by` whom it told that, `pci` what the kernel says. `position` is N of torch's "cuda:N",
    None where it is hidden."""

    gpu: DetectedGpu
    smi: SmiCard | None
    pci: PciDevice | None
    capability: tuple[int, int] | None
    position: int | None
    told_by: str = "nvidia-smi -q -x"

    @property
    def title(self) -> str:
        where = f"cuda:{self.position}" if self.position is not None else f"GPU {self.gpu.index}"
        return f"{where} ({self.gpu.name})"


@dataclass(frozen=True)
class Facts:
    """What is known of a machine; `log` is None where nvidia-smi gave none. By two numbers of
    nvidia-smi, `pairs` say how these GPUs are joined and `peers` whether they have P2P; by one,
    `nvlinks` those of a GPU."""

    machine: Machine
    log: SmiLog | None
    cards: tuple[Card, ...]
    pairs: Mapping[tuple[int, int], str]
    peers: Mapping[tuple[int, int], str]
    nvlinks: Mapping[int, NvLinks]

    @property
    def host(self) -> Host:
        return self.machine.host

    @property
    def torch(self) -> TorchBuild:
        return self.machine.torch

    @property
    def variables(self) -> Mapping[str, str]:
        return self.machine.variables

    def is_set(self, variable: str) -> bool:
        """Whether a variable that is a switch is on."""
        return self.variables.get(variable, "0") not in ("", "0")

    @property
    def visible(self) -> list[Card]:
        """The cards that torch can see, as it numbers them."""
        shown = [card for card in self.cards if card.position is not None]
        return sorted(shown, key=lambda card: card.position or 0)

    def among_visible(self, pairs: Mapping[tuple[int, int], str]) -> dict[tuple[int, int], str]:
        """Those of `pairs` of which torch can see both GPUs."""
        shown = {card.gpu.index for card in self.visible}
        return {pair: how for pair, how in pairs.items() if shown.issuperset(pair)}

    @property
    def driver(self) -> str:
        """The driver's version, "" where nobody tells."""
        if self.log and self.log.driver:
            return self.log.driver
        return next((card.gpu.driver for card in self.cards if card.gpu.driver), "")

    @property
    def driver_cuda(self) -> str:
        """The newest CUDA that the driver supports by itself, as nvidia-smi tells it."""
        return self.log.cuda if self.log else ""

    @property
    def is_windows(self) -> bool:
        return self.machine.system.get("platform") == "win32"

    @property
    def is_mac(self) -> bool:
        return self.machine.system.get("platform") == "darwin"

    @property
    def is_wsl(self) -> bool:
        return "microsoft" in self.machine.system.get("kernel", "").lower()

    @property
    def is_container(self) -> bool:
        return bool(self.container)

    @property
    def container(self) -> str:
        """The kind of container, "" outside of one. Kubernetes and NVIDIA's images tell by a
        variable where no file does."""
        if self.machine.system.get("kubernetes"):
            return "kubepods"
        own_image = "docker" if self.variables.get("NVIDIA_PYTORCH_VERSION") else ""
        return self.host.container or own_image

    @property
    def wanted_capability(self) -> tuple[int, int] | None:
        """Of the first card, for what to install; None where no card tells one."""
        return next((card.capability for card in self.visible if card.capability), None)


def gather_facts(machine: Machine) -> Facts:
    """The facts in a machine's answers. What no answer tells stays unknown."""
    log = parse_smi(machine.smi.text)
    details = {card.uuid: card for card in log.cards} if log else {
        gpu.uuid: card_from_figures(gpu, machine.figures[gpu.uuid])
        for gpu in machine.gpus if gpu.uuid in machine.figures
    }  # fmt: skip
    shown = visible_gpus(machine.gpus, machine.variables)
    positions = {gpu.uuid: position for position, gpu in enumerate(shown)}
    by_bus = {as_bus_address(address): found for address, found in machine.pci.items()}
    cards = []
    for gpu in machine.gpus:
        smi = details.get(gpu.uuid)
        address = gpu.pci_bus_id or (smi.bus_id if smi else "")
        cards.append(
            Card(
                gpu=gpu,
                smi=smi,
                pci=by_bus.get(as_bus_address(address)),
                capability=_capability(gpu, machine.torch),
                position=positions.get(gpu.uuid),
                told_by="nvidia-smi -q -x" if log else "NVML",
            )
        )
    return Facts(
        machine=machine,
        log=log,
        cards=tuple(cards),
        pairs=parse_topology(machine.topology.text),
        peers=parse_peers(machine.peers.text),
        nvlinks=parse_nvlinks(machine.nvlink.text),
    )


def as_bus_address(text: str) -> str:
    """`00000000:01:00.0` of the driver and `0000:01:00.0` of the kernel are one address."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def cpus_of(text: str) -> frozenset[int]:
    """The CPUs in a list as the kernel writes it: "0-2,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def names(things: Sequence[str]) -> str:
    """At most four, and how many more there are."""
    more = f" and {len(things) - 4} more" if len(things) > 4 else ""
    return ", ".join(things[:4]) + more


def _capability(gpu: DetectedGpu, torch: TorchBuild) -> tuple[int, int] | None:
    """The driver's, else torch's, else the catalogue's."""
    if gpu.capability:
        return gpu.capability
    told = [g.capability for g in torch.gpus if g.name == gpu.name]
    known = recognise_gpu(gpu.name, gpu.total_bytes)
    return told[0] if told else (known.capability if known else None)
