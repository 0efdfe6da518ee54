"""The other ranks of a probe, as one of them sees them: joined, and agreed with.

Ranks must take the same steps, or one of them waits for ever in a collective. So whatever a rank
would decide by its own clock, all decide together.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from search.probe.protocol import ProbeRequest, RankPlace, backend_of

# Longer than any probe: the tuner's deadline ends a rank that waits, not a collective's own.
_TIMEOUT = timedelta(days=7)


def join(request: ProbeRequest, place: RankPlace) -> Any:
    """Makes this process a rank of its world. Returns the group by which ranks agree: by gloo,
    beside the device's own queue, so that nobody waits for a device because of it."""
    is_cpu, size = request.device == "cpu", request.setting.world_size
    # A machine's name need not lead to itself, as in containers; all ranks are on this one.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        backend_of(request.device),
        store=distributed.FileStore(place.store, size),  # type: ignore[attr-defined]
        rank=place.rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=None if is_cpu else torch.device(request.device),
    )
    return distributed.new_group(backend="gloo", timeout=_TIMEOUT)


def any_of(group: Any, flag: bool) -> bool:
    """Whether it is so on any rank of a group; None is a process by itself."""
    if group is None:
        return flag
    found = torch.tensor(float(flag))
    distributed.all_reduce(found, distributed.ReduceOp.MAX, group=group)
    return bool(found)
