"""The memory that convolutions work in, which no ledger counts: a range for it.

torch lets cuDNN take what its fastest algorithm asks for, as far as that much is free (issue 49207
of pytorch/pytorch: one block of 8.7 GiB was seen), and gets it back after each convolution. What is
published of whole networks is moderate: about 100 MB for ResNet-34 at batch 160 (PR 695 of
davisking/dlib), 150 to 180 MB for ResNet-50 at 32 and 64 (issue 5536 of deeplearning4j), and on one
card no algorithm was faster for having more than 128 MB (PR 502 of sonots/cumo). So the range goes
from nothing to as much as the largest convolution reads and writes, which is above these: 610 MB in
the forward of that ResNet-34. Not measured by us.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from planner.core.units import MIB, format_bytes
from planner.ledger.ledger import GRADIENT_TO_HOST, TO_HOST, WEIGHT_TO_DEVICE, Ledger

CAP_VARIABLE = "CUDNN_CONV_WSCAP_DBG"  # MiB; cuDNN's own, which torch's documentation names


# What planner/memory/scratch.py has no law for.
UNCOUNTED_SCRATCH = "the scratch memory of kernels other than those that the estimate counts"


@dataclass(frozen=True)
class ConvolutionWorkspace:
    """`num_convolutions` in one forward, and the most that one of a step is expected to take.
    `what` is a single one called."""

    num_convolutions: int
    high_bytes: int
    what: str = "the only convolution"

    @property
    def left_out(self) -> str:
        """What the estimate leaves out, in words."""
        if self.num_convolutions == 0:
            return UNCOUNTED_SCRATCH
        if self.num_convolutions == 1:
            return f"cuDNN's workspace for {self.what}, and {UNCOUNTED_SCRATCH}"
        return (
            f"cuDNN's workspaces for {self.num_convolutions} convolutions: the range has up to "
            f"{format_bytes(self.high_bytes)} for them, as much as the largest reads and writes. "
            f"cuDNN may take more where more is free ({CAP_VARIABLE}=MIB limits it). And "
            f"{UNCOUNTED_SCRATCH}"
        )


# Swin's only convolution is its patch embedding, whose windows do not overlap: a plain product.
PATCH_EMBEDDING = ConvolutionWorkspace(1, 0, "the patch embedding")


def convolution_workspace(
    ledger: Ledger, environment: Mapping[str, str] = os.environ
) -> ConvolutionWorkspace:
    """Of the steady step. A single convolution is taken for a patch embedding: nothing is added."""
    found = [(phase, o) for phase, o in ledger.operations() if o.kind.endswith("conv")]
    paths = {operation.path for phase, operation in found if phase == "forward"}
    num_forward = sum(phase == "forward" for phase, _ in found)
    if len(paths) < 2:
        return ConvolutionWorkspace(min(num_forward, 1), 0)
    high = max(operation.num_bytes for _, operation in found)
    cap = environment.get(CAP_VARIABLE, "")
    if cap.isdecimal():
        high = min(high, int(cap) * MIB)
    return ConvolutionWorkspace(len(paths), high)


# What a step that offloads pins of the host's memory.


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
