"""What sits outside the tensors: library workspaces and the CUDA context.

None of these was measured on a device by us yet; each says where it comes from, and the estimate
lists them under `assumed` and widens its range by them.
"""

from __future__ import annotations

from planner.hardware.gpu import Gpu
from planner.units import MIB

# cuBLAS asks the caching allocator for a workspace per handle and stream, kept for good (quoted:
# getChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp, torch up to 2.14).
CUBLAS_WORKSPACE_BYTES = 8_519_680
CUBLAS_WORKSPACE_BYTES_HOPPER_AND_LATER = 33_554_432
# Handles belong to threads: forward runs in the caller's, backward in autograd's (inferred).
CUBLAS_HANDLES = 2

# Public reports of an otherwise idle process name 287 to 667 MB (quoted, FACTS §2); it grows with
# the kernels that are loaded. The middle is assumed, and both ends bound the range.
CONTEXT_BYTES = 477_000_000
CONTEXT_BYTES_LOW = 287_000_000
CONTEXT_BYTES_HIGH = 667_000_000

# The share of reserved bytes by which a replay may be off. Published errors of trackers that replay
# an allocator are 1.6 to 3% (and 10% for PyTorch's own tracker's tests); until a device has been
# measured by us, 5% either way is assumed.
RESERVED_ERROR = 0.05


def cublas_workspace_bytes(gpu: Gpu | None) -> int:
    """One workspace, in bytes; ROCm's and unknown devices are taken as the smaller."""
    if gpu is not None and gpu.vendor == "NVIDIA" and gpu.capability and gpu.capability[0] >= 9:
        return CUBLAS_WORKSPACE_BYTES_HOPPER_AND_LATER
    return CUBLAS_WORKSPACE_BYTES


def describe_workspace(num_bytes: int) -> str:
    """For an estimate's list of assumptions."""
    return (
        f"cuBLAS workspace of {num_bytes / MIB:.3f} MiB for each of {CUBLAS_HANDLES} handles "
        "(forward and backward threads)"
    )
