"""What a step that offloads pins of the host's memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from planner.ledger import TO_HOST, Ledger


@dataclass(frozen=True)
class Pinned:
    """`num_bytes` leave the device in one forward; `pinned_bytes` is what holds them. No block is
    split, and each is rounded up to a power of two (aten/src/ATen/core/CachingHostAllocator.h;
    issue 150517 of pytorch/pytorch)."""

    num_bytes: int = 0
    pinned_bytes: int = 0


def pinned_memory(ledger: Ledger) -> Pinned:
    """Of the forward that moves most. All of it is on the host at once, when that forward ends."""
    moved = [
        [op.num_bytes for _, op in run if op.name == TO_HOST]
        for phase, run in groupby(ledger.operations(), itemgetter(0))
        if phase == "forward"
    ]
    most = max(moved, key=sum, default=[])
    return Pinned(sum(most), sum(1 << (size - 1).bit_length() for size in most if size))
