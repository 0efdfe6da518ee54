"""A weight that several devices share: the rows that one keeps, and the whole while it is gathered.

torch/distributed/fsdp/_fully_shard/_fsdp_param.py of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from planner.step.strides import contiguous_strides
from planner.step.tensor import (
    DTYPE_BYTES,
    Device,
    GradientCell,
    Parameter,
    Storage,
    Tensor,
    empty,
)


class Resizable(Storage):
    """A weight's storage: there while its unit has gathered it, and known to all who saved it."""

    __slots__ = ()

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes
        self.holds = self.ident = 0
        self.category = "parameters"

    def fill(self) -> None:
        """`resize_(num_bytes)`."""
        self.ident = self.device.allocate(self.num_bytes, "resize_")
        self.device.tag(self.ident, "parameters")

    def drop(self) -> None:
        """`resize_(0)`."""
        if self.ident:
            self.device.release(self.ident)
            self.ident = 0

    def __del__(self) -> None:
        self.drop()


class Shard(Parameter):
    """The rows of a weight that this device keeps, in a storage that is padded to the rows of the
    first device. What the optimizer steps on."""

    __slots__ = ("padded_numel",)

    def __init__(self, weight: Parameter, num_shards: int, rank: int) -> None:
        rows, *rest = weight.shape
        most = -(-rows // num_shards)
        own = max(0, min(most, rows - rank * most))
        self.padded_numel = most * prod(rest)
        device = weight.device
        num_bytes = self.padded_numel * DTYPE_BYTES[weight.dtype]
        storage = Storage(device, num_bytes, "aten.new_zeros")
        shape = (own, *rest)
        Tensor.__init__(self, storage, shape, contiguous_strides(shape), weight.dtype)
        storage.assign("parameters")
        self.requires_grad = weight.requires_grad
        self.cell = GradientCell()


def chunk_cat_table(shards: Sequence[Shard], dtype: str, whole: Tensor) -> Tensor | None:
    """What CUDA's fused copy of gradients of `dtype` into `whole` reads its sizes from: six int64
    for each, two more, and one for each 2,048 bytes of a device's chunk. None from fp16 to fp32,
    which it does not copy (aten/src/ATen/native/cuda/TensorShape.cu)."""
    if dtype != whole.dtype and dtype != "bfloat16":
        return None
    size = DTYPE_BYTES[whole.dtype]
    blocks = sum(-(-shard.padded_numel * size // 2048) for shard in shards)
    return empty(whole.device, (6 * len(shards) + 2 + blocks,), "int64", "fsdp.chunk_cat")
