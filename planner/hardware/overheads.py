"""What sits outside the tensors: library workspaces, the CUDA context, and how sure a replay is.

Figures fitted from measurement records stand in `overheads.json`, per architecture, with their
date and versions (`planner validate --replay FILE --fit` prints them). Where an architecture has
none, the quoted ones below are assumed; the estimate says so and widens its range.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from planner.hardware.gpu import Gpu
from planner.units import KIB, format_bytes

MEASURED_FILE = Path(__file__).with_name("overheads.json")

# cuBLAS asks the caching allocator for a workspace per handle and stream, kept for good (quoted:
# getChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp, torch up to 2.14).
CUBLAS_WORKSPACE_BYTES = 8_519_680
CUBLAS_WORKSPACE_BYTES_LARGE = 33_554_432
LARGE_WORKSPACE_MAJORS = (9, 10, 12)  # of the capability; 11 has the smaller
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"  # deterministic training sets it
LT_VARIABLE = "CUBLASLT_WORKSPACE_SIZE"  # capped at cuBLAS's own, with which it is one
# Handles belong to threads: forward runs in the caller's, backward in autograd's (inferred).
CUBLAS_HANDLES = 2

# Public reports of an otherwise idle process name 287 to 667 MB (quoted, none ours); it grows with
# the kernels that are loaded. The middle is assumed, and both ends bound the range.
CONTEXT_BYTES = 477_000_000
CONTEXT_BYTES_LOW = 287_000_000
CONTEXT_BYTES_HIGH = 667_000_000

# The share of reserved bytes by which a replay may be off. Published errors of trackers that replay
# an allocator are 1.6 to 3%; until a device has been measured by us, 5% either way is assumed.
RESERVED_ERROR = 0.05


@dataclass(frozen=True)
class Overheads:
    """One device's, in bytes. `workspace_bytes` is one cuBLAS workspace, of which `num_workspaces`
    are held; `reserved_error` the share by which reserved bytes may be off; `basis` says what all
    of it rests on, one line each."""

    workspace_bytes: int
    num_workspaces: int
    context_bytes: int
    context_low_bytes: int
    context_high_bytes: int
    reserved_error: float
    basis: tuple[str, ...]


def overheads_for(gpu: Gpu | None, environment: Mapping[str, str] = os.environ) -> Overheads:
    """Those measured on the architecture of `gpu`, else those assumed for it, in an environment."""
    workspace = _workspace_bytes(gpu, environment)
    of_workspace = _workspace_basis(gpu, workspace, environment)
    measured = measured_overheads().get(gpu.architecture) if gpu is not None else None
    if measured is not None:
        return Overheads(
            workspace,
            CUBLAS_HANDLES,
            measured["context_bytes"],
            measured["context_low_bytes"],
            measured["context_high_bytes"],
            measured["reserved_error"],
            (*of_workspace, measured["basis"]),
        )
    basis = [
        *of_workspace,
        f"a CUDA context of {format_bytes(CONTEXT_BYTES)}, within the "
        f"{format_bytes(CONTEXT_BYTES_LOW)} to {format_bytes(CONTEXT_BYTES_HIGH)} of public "
        "reports",
        f"reserved memory within {RESERVED_ERROR:.0%}: not measured on this architecture yet",
    ]
    if gpu is None:
        basis.insert(0, "an NVIDIA GPU older than Hopper, since no GPU was named")
    return Overheads(
        workspace,
        CUBLAS_HANDLES,
        CONTEXT_BYTES,
        CONTEXT_BYTES_LOW,
        CONTEXT_BYTES_HIGH,
        RESERVED_ERROR,
        tuple(basis),
    )


@cache
def measured_overheads() -> dict[str, dict[str, Any]]:
    """architecture -> what was fitted from its records."""
    measured: dict[str, dict[str, Any]] = json.loads(MEASURED_FILE.read_text())
    return measured


def _workspace_bytes(gpu: Gpu | None, environment: Mapping[str, str]) -> int:
    """As torch chooses it: by the variable, else by the major capability. ROCm's and unknown
    devices are taken as the smaller."""
    if gpu is not None and gpu.vendor != "NVIDIA":
        return CUBLAS_WORKSPACE_BYTES
    given = _given_workspace_bytes(environment)
    if given is not None:
        return given
    if gpu is not None and gpu.capability and gpu.capability[0] in LARGE_WORKSPACE_MAJORS:
        return CUBLAS_WORKSPACE_BYTES_LARGE
    return CUBLAS_WORKSPACE_BYTES


def _given_workspace_bytes(environment: Mapping[str, str]) -> int | None:
    """`:4096:8` is eight buffers of 4,096 KiB; several pairs add up. None where nothing is given
    or it cannot be read, which torch warns of and passes over."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get(WORKSPACE_VARIABLE, ""))
    return sum(int(size) * KIB * int(count) for size, count in pairs) if pairs else None


def _workspace_basis(gpu: Gpu | None, num_bytes: int, environment: Mapping[str, str]) -> list[str]:
    told = ""
    if (gpu is None or gpu.vendor == "NVIDIA") and _given_workspace_bytes(environment) is not None:
        told = f", as {WORKSPACE_VARIABLE}={environment[WORKSPACE_VARIABLE]} says"
    basis = [
        f"cuBLAS workspace of {format_bytes(num_bytes)} for each of {CUBLAS_HANDLES} handles "
        f"(forward and backward threads){told}"
    ]
    if environment.get(LT_VARIABLE):
        basis.append(f"{LT_VARIABLE} adds nothing: cuBLASLt works in cuBLAS's workspace")
    return basis
