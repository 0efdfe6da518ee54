"""How the devices of a training are joined: the link within a machine, and the network between.

What nobody named is assumed from the GPU, and said.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.core.errors import UsageError
from planner.machine.hardware.gpu import Gpu
from planner.machine.hardware.links import (
    Link,
    all_links,
    bus_factor,
    find_link,
    names_of,
    start_seconds,
)

if TYPE_CHECKING:
    from planner.core.schema.distribution import Collective

ASSUMED_NETWORK = "100gbe-rdma"
# By the beginning of a GPU's name. GeForce cards reach each other through the host: NVIDIA's driver
# grants them no P2P over PCIe (pull request 22 of tinygrad/open-gpu-kernel-modules).
_USUAL = (
    (r"v100-sxm", "nvlink-v100"),
    (r"a100-sxm", "nvlink-a100"),
    (r"h[12]00-sxm", "nvlink-h100"),
    (r"b200", "nvlink-b200"),
    (r"mi3[02]", "xgmi-mi300x"),
    (r"rtx-50[5-9]0", "no-p2p-pcie5"),
    (r"rtx-[234]0[5-9]0|titan-rtx", "no-p2p"),
)
# Several of these are joined in ways of their own, of which no figures were found.
_UNKNOWN = r"gh200|mi2"
_PCIE = ((48e9, "pcie5"), (24e9, "pcie4"), (0.0, "pcie3"))
_CARDS = re.compile(r"([1-9]\d?)x(.+)")


@dataclass(frozen=True)
class Fabric:
    """`within` joins the devices of a machine, `cards` of `between` each machine to the others.
    `assumed` says what nobody named."""

    within: Link
    between: Link | None = None
    cards: int = 1
    assumed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As `--link` takes it."""
        if self.between is None:
            return self.within.name
        cards = f"{self.cards}x" if self.cards > 1 else ""
        return f"{self.within.name},{cards}{self.between.name}"

    @property
    def spread(self) -> float:
        """How far times may be off either way, relative."""
        return max(link.spread for link in (self.within, self.between) if link is not None)

    def seconds(
        self, collective: Collective, num_bytes: int, ranks: int, nodes: int = 1, sharing: int = 1
    ) -> float:
        """Of a collective between `ranks` devices on `nodes` machines, while `sharing` such groups
        share each machine's network.

        Between machines a ring's bus bandwidth is that of the network cards of a machine, or of
        the link within where that is less (NCCL lays a ring through each card).
        """
        if nodes == 1 or ranks < 2 or not num_bytes:
            return self.within.seconds(collective, num_bytes, ranks)
        assert self.between is not None, "a fabric of several machines has a network"
        if self.between.curves:
            return sharing * self.between.seconds(collective, num_bytes, ranks)
        rate = self.cards * self.between.bus_rate(collective, ranks) / sharing
        hop = self.between.hop
        if ranks > nodes:
            rate = min(rate, self.within.bus_rate(collective, ranks // nodes))
            hop = self.within.hop
        start = start_seconds(collective, ranks, hop, nodes)
        return start + bus_factor(collective, ranks) * num_bytes / rate


def find_fabric(gpu: Gpu | None, nodes: int, text: str | None = None, of_node: int = 1) -> Fabric:
    """The links that `text` names: within a machine, between machines, or both with a comma
    between (`nvlink-a100,8xib-hdr`: eight cards of it in a machine). What it does not name, and
    there is, is what `gpu` usually has. `of_node` devices are in each machine.

    Raises UsageError: a link that is not known or joins fewer, one between machines where there is
    one, or a GPU that has no usual one.
    """
    within: Link | None = None
    between: Link | None = None
    cards, assumed = 1, []
    for part in (text or "").split(","):
        if not part.strip():
            continue
        count, link = _counted(part.strip())
        if link.hop == "network" and nodes == 1:
            raise UsageError(
                f"{part.strip()} joins machines, and there is one.",
                "Say in how many the GPUs are with --nodes, or name the link between them.",
            )
        if link.hop == "network":
            between, cards = link, count
        elif count > 1:
            raise UsageError(
                f"{part.strip()} counts a link within a machine.",
                "Only networks are counted, by their cards in a machine: 8xib-ndr.",
            )
        else:
            within = link
    if within is None:
        within = usual_link(gpu)
        assumed.append(f"{within.name} between GPUs ({within.title}); --link names another")
    if within.most is not None and of_node > within.most:
        raise UsageError(
            f"{within.name} joins at most {within.most} GPUs in a machine, and each of {nodes} "
            f"has {of_node}.",
            f"Say in how many machines they are (--nodes {nodes * -(-of_node // within.most)}), or "
            "name another link (--link).",
        )
    if nodes > 1 and between is None:
        between = find_link(ASSUMED_NETWORK)
        assumed.append(
            f"{between.name} between machines, one card in each ({between.title}): networks differ "
            "a hundredfold; --link names another"
        )
    return Fabric(within, between, cards, tuple(assumed))


def has_usual_link(gpu: Gpu) -> bool:
    """Whether it is known what joins several of them."""
    return not re.match(_UNKNOWN, gpu.name)


def usual_link(gpu: Gpu | None) -> Link:
    """What joins several of `gpu` in a machine as most are sold. Raises UsageError."""
    if gpu is None or not has_usual_link(gpu):
        what = "no GPU was named" if gpu is None else f"{gpu.title} has no usual one"
        within = names_of(link for link in all_links() if link.hop != "network")
        raise UsageError(
            f"the link between GPUs is not known: {what}.", f"Name it with --link: {within}."
        )
    for pattern, name in _USUAL:
        if re.match(pattern, gpu.name):
            return find_link(name)
    host = gpu.link_bandwidth or 0.0
    return find_link(next(name for least, name in _PCIE if host >= least))


def _counted(text: str) -> tuple[int, Link]:
    found = _CARDS.fullmatch(text)
    return (int(found[1]), find_link(found[2])) if found else (1, find_link(text))
