"""What a step that offloads pins of the host's memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from planner.ledger.ledger import GRADIENT_TO_HOST, TO_HOST, WEIGHT_TO_DEVICE, Ledger


@dataclass(frozen=True)
class Pinned:
    """`num_bytes` are held of what is on the device, in `pinned_bytes`. No block is
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
    return _pinned(most)


def pinned_by_optimizer(ledger: Ledger) -> Pinned:
    """Of an optimizer on the host: a copy of each weight that it updates, and of its gradient."""
    weights = [op.num_bytes for _, op in ledger.operations() if op.name == WEIGHT_TO_DEVICE]
    return _pinned(2 * weights)


def leaving_bytes(ledger: Ledger) -> int:
    """Of gradients on their way to the host, whose memory is used again only once they are there:
    where memory is plentiful torch may reserve as much more."""
    return sum(op.num_bytes for _, op in ledger.operations() if op.name == GRADIENT_TO_HOST)


def _pinned(sizes: list[int]) -> Pinned:
    return Pinned(sum(sizes), sum(1 << (size - 1).bit_length() for size in sizes if size))
