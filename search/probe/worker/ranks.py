"""The other ranks of a probe, as one of them sees them: joined, agreed with, waited for.

Ranks must take the same steps, or one of them waits for ever in a collective. So whatever a rank
would decide by its own clock, all decide together.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from planner.core.schema.record import WorldInfo
from search.probe.protocol import ProbeRequest, RankPlace

# Longer than any probe: the tuner's deadline ends a rank that waits, not a collective's own.
_TIMEOUT = timedelta(days=7)


class Ranks:
    """Which ranks there are beside this one: none, in a probe of one process."""

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return flag

    def describe(self) -> WorldInfo | None:
        return None


class World(Ranks):
    """The ranks of this process's world."""

    def __init__(self, request: ProbeRequest, place: RankPlace) -> None:
        self.request, self.place = request, place
        self.backend = "gloo" if request.device == "cpu" else "nccl"
        # A machine's name need not lead to itself, as in containers; all ranks are on this one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        size = request.setting.world_size
        distributed.init_process_group(
            self.backend,
            store=distributed.FileStore(place.store, size),  # type: ignore[attr-defined]
            rank=place.rank,
            world_size=size,
            timeout=_TIMEOUT,
            device_id=None if request.device == "cpu" else torch.device(request.device),
        )
        self.control: Any = distributed.new_group(backend="gloo", timeout=_TIMEOUT)

    def any(self, flag: bool) -> bool:
        """By gloo, beside the device's own queue: nobody waits for a device because of it."""
        found = torch.tensor(float(flag))
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self.control)
        return bool(found)

    def describe(self) -> WorldInfo:
        setting = self.request.setting
        nccl = torch.cuda.nccl.version() if self.backend == "nccl" else None
        return WorldInfo(
            world_size=setting.world_size,
            nodes=setting.nodes,
            backend=self.backend,
            nccl=None if nccl is None else ".".join(map(str, nccl)),
            threads=self.place.threads,
            links=_links(self.request, self.place),
        )


def _links(request: ProbeRequest, place: RankPlace) -> tuple[str, ...]:
    """How this rank's device reaches those of the others, as far as CUDA says."""
    if request.device == "cpu":
        return ("processes of one machine, by its loopback",)
    own = torch.device(request.device).index
    first = own - place.rank
    others = [first + r for r in range(request.setting.world_size) if r != place.rank]
    direct = [other for other in others if torch.cuda.can_device_access_peer(own, other)]
    return (f"cuda:{own} reaches {len(direct)} of {len(others)} other GPUs directly (P2P)",)
