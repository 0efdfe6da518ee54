"""How the devices of a training are joined: the link within a machine, and the network between
machines. A link that nobody named is assumed from the GPU, and the assumption is stated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from planner.core.errors import UsageError, unknown_name
from planner.machine.hardware.gpu import Gpu

if TYPE_CHECKING:
    from planner.core.schema.setting import Collective


# Links between devices: how long a collective takes, by the bytes of the whole array (as nccl-tests
# counts) and the number of ranks.
#
# `links.json` has the figures, each with its source. Where a link's times were published by size,
# times lie between these points. Of any other link one rate of large arrays is known, and the start
# is NCCL's own model of a ring. A number in place of a name is a bus bandwidth that somebody
# measured.

Hop = Literal["nvlink", "pcie", "network"]

# Seconds of NCCL's ring with protocol Simple: before all steps, and of a step from one rank to the
# next (NVIDIA/nccl @5067397, src/graph/tuning.cc, baseLat and hwLat). The other protocols are
# faster for small arrays by this model, and by less in what was published (docs/many-gpus.md).
_START_SECONDS = 8.4e-6
_HOP_SECONDS: Mapping[Hop, float] = {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 14e-6}
# By which share times may be off either way. Two machines of 8 A100 were published at 154 and at
# 229 GB/s, a ratio of 1.5. Where somebody measured the devices themselves: a judgement.
SPREAD, MEASURED_SPREAD = 0.5, 0.15


_NUMBER = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?GB/s", re.IGNORECASE)


class Curve(NamedTuple):
    """Times of one collective over one number of ranks: (bytes, seconds), by size."""

    collective: Collective
    ranks: int
    points: tuple[tuple[int, float], ...]

    def seconds(self, num_bytes: int, start_seconds: float) -> float:
        """The time of `num_bytes`: on the line between two points, both on logarithmic scales.
        Below the first point the time falls to `start_seconds`; above the last the rate stays."""
        first, last = self.points[0], self.points[-1]
        if num_bytes <= first[0]:
            start = min(start_seconds, first[1])
            return start + (first[1] - start) * num_bytes / first[0]
        if num_bytes > last[0]:
            return last[1] * num_bytes / last[0]
        return _interpolate(self.points, num_bytes)


class Rate(NamedTuple):
    """The bus bandwidth of large arrays over one number of ranks, bytes/s."""

    collective: Collective
    ranks: int
    bytes_per_second: float


@dataclass(frozen=True)
class Link:
    """One link. It has curves or else rates, at least those of all-reduce. `hop` is what a step of
    a ring crosses. Times may be off by the share `spread` either way. `sources` are where its
    figures were read. It joins at most `most` devices in a machine; None where that is not
    bounded."""

    name: str
    title: str
    hop: Hop
    spread: float
    curves: tuple[Curve, ...]
    rates: tuple[Rate, ...]
    sources: tuple[str, ...]
    most: int | None = None

    def seconds(self, collective: Collective, num_bytes: int, ranks: int) -> float:
        """The seconds of `collective` over `num_bytes` of the whole array between `ranks` devices.
        A collective without figures of its own has all-reduce's bus bandwidth: an all-gather or a
        reduce-scatter takes half of its time."""
        if ranks < 2 or not num_bytes:
            return 0.0
        factor = bus_factor(collective, ranks)
        if self.curves:
            return factor * self._seconds_per_factor(collective, num_bytes, ranks)
        moving = factor * num_bytes / self.bus_rate(collective, ranks)
        return start_seconds(collective, ranks, self.hop) + moving

    def bus_rate(self, collective: Collective, ranks: int) -> float:
        """The bus bandwidth of large arrays, bytes/s."""
        if self.curves:
            size = max(curve.points[-1][0] for curve in self.curves)
            return size / self._seconds_per_factor(collective, size, ranks)
        rates = [r for r in self.rates if r.collective == collective]
        rates = rates or [r for r in self.rates if r.collective == "all_reduce"]
        return _interpolate([(r.ranks, r.bytes_per_second) for r in rates], ranks)

    def _seconds_per_factor(self, collective: Collective, num_bytes: int, ranks: int) -> float:
        """Seconds divided by the bus factor, which compare between numbers of ranks."""
        curves = [c for c in self.curves if c.collective == collective]
        curves = curves or [c for c in self.curves if c.collective == "all_reduce"]
        return _interpolate(
            [
                (
                    curve.ranks,
                    curve.seconds(num_bytes, start_seconds(curve.collective, ranks, self.hop))
                    / bus_factor(curve.collective, curve.ranks),
                )
                for curve in curves or self.curves
            ],
            ranks,
        )


def start_seconds(collective: Collective, ranks: int, hop: Hop, nodes: int = 1) -> float:
    """What the steps of a ring cost, however small the array; those between machines cross the
    network."""
    passes = 2 if collective == "all_reduce" else 1
    steps, crossing = passes * (ranks - 1), passes * (nodes - 1)
    within = (steps - crossing) * _HOP_SECONDS[hop]
    return _START_SECONDS + within + crossing * _HOP_SECONDS["network"]


@cache
def all_links() -> tuple[Link, ...]:
    """Every link of the catalogue."""
    data = read_catalogue()
    return tuple(_link(entry, data["documents"]) for entry in data["links"])


def read_catalogue() -> dict[str, Any]:
    """`links.json` as it is. Published points that no prediction uses are `held_out` in it."""
    path = Path(__file__).with_name("links.json")
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def find_link(text: str) -> Link:
    """The link that `text` names: one of the catalogue, or a measured bus bandwidth (`25GB/s`).

    Raises UsageError with the names that are near.
    """
    name = text.strip().casefold().replace("_", "-").replace(" ", "-")
    for link in all_links():
        if link.name == name:
            return link
    if number := _NUMBER.fullmatch(text.strip()):
        return _measured(float(number[1]), text.strip())
    names = names_of(all_links())
    way_out = f"Name one of {names}; or the bus bandwidth that nccl-tests measured, as 25GB/s."
    raise unknown_name("link", text, [link.name for link in all_links()], way_out)


def _measured(gb_s: float, name: str) -> Link:
    """A link whose all-reduce reaches so many GB/s of bus bandwidth. Its hop is the quickest,
    NVLink's, so that the start of small arrays is a lower bound."""
    if not gb_s:
        raise UsageError("a link of 0 GB/s joins nothing.", "Pass what nccl-tests measured.")
    return Link(
        name=name, title=f"measured at {name} of bus bandwidth", hop="nvlink",
        spread=MEASURED_SPREAD, curves=(), rates=(Rate("all_reduce", 2, gb_s * 1e9),),
        sources=("as it was given",),
    )  # fmt: skip


def bus_factor(collective: Collective, world_size: int) -> float:
    """Bus bandwidth divided by `num_bytes / seconds`, as nccl-tests defines it
    (doc/PERFORMANCE.md): what each link carries, so that worlds of any size compare."""
    others = (world_size - 1) / world_size
    if collective == "all_reduce":
        return 2 * others
    return 1.0 if collective == "broadcast" else others


def _link(entry: Mapping[str, Any], documents: Mapping[str, str]) -> Link:
    figures = [*entry.get("curves", ()), *entry.get("rates", ())]
    return Link(
        name=entry["name"],
        title=entry["title"],
        hop=entry["hop"],
        spread=SPREAD,
        curves=tuple(_curve(curve) for curve in entry.get("curves", ())),
        rates=tuple(_rate(rate) for rate in entry.get("rates", ())),
        sources=tuple(dict.fromkeys(documents[figure["document"]] for figure in figures)),
        most=entry.get("most"),
    )


def _curve(entry: Mapping[str, Any]) -> Curve:
    points = tuple((size, microseconds * 1e-6) for size, microseconds in entry["points"])
    return Curve(entry.get("collective", "all_reduce"), entry["ranks"], points)


def _rate(entry: Mapping[str, Any]) -> Rate:
    return Rate(entry.get("collective", "all_reduce"), entry["ranks"], entry["gb_s"] * 1e9)


def _interpolate(points: Sequence[tuple[int, float]], x: int) -> float:
    """The value at `x`: on the line between two points, both on logarithmic scales; beyond them the
    nearest's."""
    ordered = sorted(points)
    for (low, value), (high, next_value) in pairwise(ordered):
        if low <= x <= high and low < high:
            share = log(x / low) / log(high / low)
            return exp((1 - share) * log(value) + share * log(next_value))
    return ordered[0][1] if x < ordered[0][0] else ordered[-1][1]


def names_of(links: Iterable[Link]) -> str:
    return ", ".join(link.name for link in links)


ASSUMED_NETWORK = "100gbe-rdma"
_CARDS = re.compile(r"([1-9]\d?)x(.+)")


@dataclass(frozen=True)
class Fabric:
    """`within` joins the devices of a machine; `cards` cards of `between` join each machine to the
    others. `assumed` states what nobody named."""

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
        """By which share times may be off either way."""
        return max(link.spread for link in (self.within, self.between) if link is not None)

    def seconds(
        self, collective: Collective, num_bytes: int, ranks: int, nodes: int = 1, sharing: int = 1
    ) -> float:
        """The seconds of a collective between `ranks` devices on `nodes` machines, while `sharing`
        such groups share each machine's network.

        Between machines the bus bandwidth of a ring is that of a machine's network cards, or that
        of the link within where it is lower (NCCL lays a ring through each card).
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
    (`nvlink-a100,8xib-hdr`: eight cards of ib-hdr in each machine). A link that it does not name is
    the one that `gpu` usually has. Each machine has `of_node` devices.

    Raises UsageError for a link that is unknown or joins fewer devices, for a network where there
    is one machine, and for a GPU without a usual link.
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


def usual_link(gpu: Gpu | None) -> Link:
    """What joins several of `gpu` in a machine as most are sold. Raises UsageError."""
    if gpu is not None and gpu.joined_by is not None:
        return find_link(gpu.joined_by)
    what = "no GPU was named" if gpu is None else f"{gpu.title} has no usual one"
    within = names_of(link for link in all_links() if link.hop != "network")
    raise UsageError(
        f"the link between GPUs is not known: {what}.", f"Name it with --link: {within}."
    )


def _counted(text: str) -> tuple[int, Link]:
    found = _CARDS.fullmatch(text)
    return (int(found[1]), find_link(found[2])) if found else (1, find_link(text))
