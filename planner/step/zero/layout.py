"""How DeepSpeed's first two stages lay weights end to end and deal them out to devices.

deepspeed/runtime/zero/stage_1_and_2.py of DeepSpeed 0.19.8. P parameters in all, N devices,
A = P rounded up to a multiple of 2N. Sizes are in elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# `nccl_start_alignment_factor`: each share begins at a multiple of so many elements.
ALIGNMENT = 2


class Piece(NamedTuple):
    """A run of one weight that lies in the share of device `rank`."""

    rank: int
    numel: int


@dataclass(frozen=True)
class Layout:
    """Weights of `numels` elements, in the order of the module's parameters, over `world_size`."""

    numels: tuple[int, ...]
    world_size: int

    @property
    def num_parameters(self) -> int:
        return sum(self.numels)

    @cached_property
    def aligned(self) -> int:
        """A: the length of the flat tensor (`flatten_dense_tensors_aligned`)."""
        unit = ALIGNMENT * self.world_size
        return -(-self.num_parameters // unit) * unit

    @property
    def share(self) -> int:
        """A/N: what one device updates."""
        return self.aligned // self.world_size

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """By weight, the runs that lie in one share each."""
        found, start = [], 0
        for numel in self.numels:
            end = start + numel
            ranks = range(start // self.share, -(-end // self.share))
            bounds = [max(start, rank * self.share) for rank in ranks] + [end]
            runs = zip(ranks, bounds, bounds[1:], strict=False)
            found.append(tuple(Piece(rank, after - before) for rank, before, after in runs))
            start = end
        return tuple(found)

    def fullest_rank(self, in_backward: bool) -> int:
        """The device whose share touches weights of the most elements: it keeps their whole
        gradients (`copy_grads_in_partition`). Where gradients leave `in_backward`, the last: its
        are of the layers that backward begins with, and lie beside all activations."""
        if in_backward:
            return self.world_size - 1
        touched = [0] * self.world_size
        for numel, pieces in zip(self.numels, self.pieces, strict=True):
            for piece in pieces:
                touched[piece.rank] += numel
        return touched.index(max(touched))

    def of_rank(self, rank: int) -> list[tuple[int, int]]:
        """(weight, elements of it in the share) for all weights that the share touches."""
        return [
            (weight, piece.numel)
            for weight, pieces in enumerate(self.pieces)
            for piece in pieces
            if piece.rank == rank
        ]

    def runs(self, weights: Sequence[int]) -> list[int]:
        """Lengths of the runs of `weights`, laid end to end, that one device owns each
        (`average_tensor` joins neighbours of the same owner)."""
        lengths: list[int] = []
        last = -1
        for weight in weights:
            for rank, numel in self.pieces[weight]:
                if rank == last:
                    lengths[-1] += numel
                else:
                    lengths.append(numel)
                last = rank
        return lengths
