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
        self.cell = GradientCell(storage.ident)


def chunk_cat_table(chunks: Sequence[int], dtype: str, whole_dtype: str) -> int:
    """The bytes of the int64 table that CUDA's fused copy of gradients of `dtype` reads its sizes
    from: six numbers for each gradient, two more, and one for each 2,048 bytes of its chunk, which
    has so many elements of `whole_dtype`. 0 from fp16 to fp32, which it does not copy
    (aten/src/ATen/native/cuda/TensorShape.cu, `_chunk_cat_out_cuda`)."""
    if dtype not in (whole_dtype, "bfloat16"):
        return 0
    size = DTYPE_BYTES[whole_dtype]
    blocks = sum(-(-numel * size // 2048) for numel in chunks)
    return 8 * (6 * len(chunks) + 2 + blocks)
