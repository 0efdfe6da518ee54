"""Which reduction a kernel makes of a tensor's dimensions, as TensorIterator lays them out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple

from planner.memory.scratch import vector_of
from planner.step.tensor import Device, Tensor


class Reduction(NamedTuple):
    """The sizes of the laws "reduction" and "semaphores" (`planner.memory.scratch`)."""

    outputs: int
    inputs: int
    along: int
    vector: int


def reduction_of(
    shape: Sequence[int], strides: Sequence[int], dims: Collection[int]
) -> Reduction | None:
    """Of `dims` of a tensor; None where nothing is summed."""
    summed = _joined([(strides[d], shape[d]) for d in dims if shape[d] > 1])
    left = _joined([(strides[d], n) for d, n in enumerate(shape) if d not in dims and n > 1])
    if not summed:
        return None
    inputs, outputs = prod(n for _, n in summed), prod(n for _, n in left)
    fastest = summed[0][0]
    if not left or fastest < left[0][0]:
        wide = fastest == 1 and len(summed) == 1
        return Reduction(outputs, inputs, 1, 4 if wide else 1)
    others = [stride for stride, _ in (*summed, *left[1:])]
    vector = vector_of(left[0][1], *others) if left[0][0] == 1 else 1
    return Reduction(outputs, inputs, 0, vector)


def take_reduction(x: Tensor, dims: Collection[int], label: str, of: str = "") -> None:
    """What the kernel that sums `dims` of `x` asks for and gives back."""
    found = reduction_of(x.shape, x.strides, dims)
    if found is not None:
        take_reduced(x.device, of, found, label)


def take_reduced(device: Device, of: str, sizes: tuple[int, ...], label: str) -> None:
    """The partial sums of blocks that share an output, and their semaphores."""
    sums = device.take(f"{of}reduction", sizes, label)
    semaphores = device.take(f"{of}semaphores", sizes, label)
    del semaphores
    del sums


def _joined(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(stride, size), fastest first, with those joined that follow each other without a gap."""
    joined: list[tuple[int, int]] = []
    for stride, size in sorted(dims):
        if joined and stride == joined[-1][0] * joined[-1][1]:
            joined[-1] = joined[-1][0], joined[-1][1] * size
        else:
            joined.append((stride, size))
    return joined
