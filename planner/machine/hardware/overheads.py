"""What sits outside the tensors: library workspaces, the CUDA context, and how sure a replay is.

Figures fitted from measurement records stand in `overheads.json`, per architecture, with their
date and versions (`python -m tests.truth.fit FILE` prints them). Where an architecture has
none, the quoted ones below are assumed; the estimate says so and widens its range.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.core.torch_version import NEWEST_TRIED, OLDEST_TRIED, torch_version
from planner.core.units import KIB, MIB, format_bytes
from planner.ledger.ledger import WORKSPACE_VARIABLE
from planner.machine.hardware.gpu import Gpu
from planner.memory.scratch import Processors

MEASURED_FILE = Path(__file__).with_name("overheads.json")

# cuBLAS asks the caching allocator for a workspace per handle and stream, kept for good (quoted:
# getChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp, torch up to 2.14).
CUBLAS_WORKSPACE_BYTES = 8_519_680
CUBLAS_WORKSPACE_BYTES_LARGE = 33_554_432
LARGE_WORKSPACE_MAJORS = (9, 10, 12)  # of the capability; 11 has the smaller
LT_VARIABLE = "CUBLASLT_WORKSPACE_SIZE"  # capped at cuBLAS's own, with which it is one
# Handles belong to threads: forward runs in the caller's, backward in autograd's (inferred).
CUBLAS_HANDLES = 2


def num_workspaces() -> int:
    """How many cuBLAS workspaces are held. From torch 2.15 on each product requests its own and
    frees it."""
    return CUBLAS_HANDLES if torch_version() < (2, 15) else 0


# Where no GPU is named, an A100's (NVIDIA's whitepaper).
ASSUMED_PROCESSORS = Processors(num_sms=108, threads_per_sm=2048, capability=(8, 0))

# Public reports of an otherwise idle process name 287 to 667 MB (quoted, none ours); it grows with
# the kernels that are loaded. The middle is assumed, and both ends bound the range.
CONTEXT_BYTES = 477_000_000
CONTEXT_BYTES_LOW = 287_000_000
CONTEXT_BYTES_HIGH = 667_000_000

# The share of reserved bytes by which a replay may be off. A Swin's eager step on one GPU reserves
# what is predicted under torch's own CUDA code, on emulated NVIDIA GPUs (docs/accuracy.md;
# torch 2.9 to 2.15: the worst 1.94%) and on an H200 (from batch 8 on: the worst 1.96%).
RESERVED_ERROR = 0.02
# Of every other step: what the trials of cuDNN take in the first one may stay reserved beside a
# small step (an H200's worst: 8.6% of a checkpointed Swin, 6% of other models over what their
# convolutions are known to ask for), or the order of requests follows torch's compiler, or was not
# tried.
RESERVED_ERROR_UNTRIED = 0.09


@dataclass(frozen=True)
class Overheads:
    """What a device needs besides the tensors, in bytes. `num_workspaces` cuBLAS workspaces of
    `workspace_bytes` each are held. Reserved bytes may be off by the share `reserved_error`.
    `basis` says what the figures rest on, a line each."""

    workspace_bytes: int
    num_workspaces: int
    processors: Processors
    context_bytes: int
    context_low_bytes: int
    context_high_bytes: int
    reserved_error: float
    basis: tuple[str, ...]


def overheads_for(
    gpu: Gpu | None, environment: Mapping[str, str] = os.environ, *, is_known: bool = True
) -> Overheads:
    """The overheads of `gpu` in an environment: those measured on its architecture, else assumed
    ones. `is_known`: the step is of a kind that `was_emulated`."""
    workspace = _workspace_bytes(gpu, environment)
    of_device = _workspace_basis(gpu, workspace, environment)
    reserved_error, of_reserved = _assumed_error(gpu, is_known)
    measured = measured_overheads().get(gpu.architecture) if gpu is not None else None
    if measured is not None:
        context, low, high = (measured[f"context_{end}bytes"] for end in ("", "low_", "high_"))
        reserved_error = max(measured["reserved_error"], reserved_error)
        basis = [*of_device, measured["basis"]]
    else:
        context, low, high = CONTEXT_BYTES, CONTEXT_BYTES_LOW, CONTEXT_BYTES_HIGH
        basis = [
            *of_device,
            f"a CUDA context of {format_bytes(CONTEXT_BYTES)}, within the "
            f"{format_bytes(CONTEXT_BYTES_LOW)} to {format_bytes(CONTEXT_BYTES_HIGH)} of public "
            "reports",
            f"reserved memory within {reserved_error:.0%}: {of_reserved}",
        ]
    if gpu is None:
        basis.insert(
            0,
            "an NVIDIA GPU older than Hopper, and the scratch of reductions as on an A100 "
            f"({ASSUMED_PROCESSORS.num_sms} multiprocessors), since no GPU was named",
        )
    return Overheads(
        workspace_bytes=workspace,
        num_workspaces=num_workspaces(),
        processors=processors_of(gpu),
        context_bytes=context,
        context_low_bytes=low,
        context_high_bytes=high,
        reserved_error=reserved_error,
        basis=tuple(basis),
    )


def was_emulated(model: Model, setting: TrainSetting) -> bool:
    """Whether torch's own CUDA code was seen to reserve what is predicted for steps of this
    kind."""
    plain = (setting.world_size, setting.compile, setting.checkpointing) == (1, "off", "none")
    return plain and isinstance(model, SwinConfig)


def _assumed_error(gpu: Gpu | None, is_known: bool) -> tuple[float, str]:
    """The share of reserved bytes by which a replay may be off, and why."""
    is_tried = OLDEST_TRIED <= torch_version() <= NEWEST_TRIED
    if is_known and is_tried and (gpu is None or gpu.vendor == "NVIDIA"):
        return RESERVED_ERROR, (
            "torch's own CUDA code on an emulated GPU allocates what is predicted, and an H200 "
            "did; no real card of this architecture has been measured yet"
        )
    return RESERVED_ERROR_UNTRIED, (
        "what cuDNN's trials or torch's compiler leave reserved is not predicted"
    )


def processors_of(gpu: Gpu | None) -> Processors:
    """The processors that decide the scratch of kernels: a GPU's own, or the assumed ones."""
    if gpu is None:
        return ASSUMED_PROCESSORS
    capability = gpu.capability or ASSUMED_PROCESSORS.capability
    return Processors(gpu.num_sms, gpu.threads_per_sm, capability)


@cache
def measured_overheads() -> dict[str, dict[str, Any]]:
    """What was fitted from the records of a card, by architecture."""
    measured: dict[str, dict[str, Any]] = json.loads(MEASURED_FILE.read_text())
    return measured


def _workspace_bytes(gpu: Gpu | None, environment: Mapping[str, str]) -> int:
    """The bytes of a cuBLAS workspace as torch chooses them: by the variable, else by the major
    capability. ROCm's and unknown devices have the smaller one."""
    if gpu is not None and gpu.vendor != "NVIDIA":
        return CUBLAS_WORKSPACE_BYTES
    num_bytes = _variable_bytes(environment)
    if num_bytes is not None:
        return num_bytes
    if gpu is not None and gpu.capability and gpu.capability[0] in LARGE_WORKSPACE_MAJORS:
        return CUBLAS_WORKSPACE_BYTES_LARGE
    return CUBLAS_WORKSPACE_BYTES


def _variable_bytes(environment: Mapping[str, str]) -> int | None:
    """The bytes that the variable asks for: `:4096:8` is eight buffers of 4,096 KiB, several pairs
    add up. None where it is not set or cannot be read, which torch ignores with a warning."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get(WORKSPACE_VARIABLE, ""))
    return sum(int(size) * KIB * int(count) for size, count in pairs) if pairs else None


def _workspace_basis(gpu: Gpu | None, num_bytes: int, environment: Mapping[str, str]) -> list[str]:
    reason = ""
    if (gpu is None or gpu.vendor == "NVIDIA") and _variable_bytes(environment) is not None:
        reason = f", as {WORKSPACE_VARIABLE}={environment[WORKSPACE_VARIABLE]} says"
    whose = (
        f"for each of {num_workspaces()} handles (forward and backward threads)"
        if num_workspaces()
        else "for each matrix product while it runs"
    )
    basis = [f"cuBLAS workspace of {format_bytes(num_bytes)} {whose}{reason}"]
    if environment.get(LT_VARIABLE):
        basis.append(f"{LT_VARIABLE} adds nothing: cuBLASLt works in cuBLAS's workspace")
    return basis


# What NCCL keeps on a device for itself, outside PyTorch's allocator, beside the CUDA context.

# Derived: a channel keeps 10 MiB to receive from a peer and 2 MiB to send to it (src/init.cc and
# src/transport/p2p.cc of NVIDIA/nccl @5067397c), and two channels to one peer are the fewest.
FEWEST_BYTES = 2 * 12 * MIB
# Quoted, of one communicator: 544 to 688 MB on 4 A100s (issue 964 of NVIDIA/nccl), 1.06 GB on 8
# H100s (issue 1685). It grows with the channels, which NVLink has more of than PCIe.
COMMUNICATOR_BYTES_UP_TO_FOUR = (616_000_000, 688_000_000)
COMMUNICATOR_BYTES_ABOVE_FOUR = (1_060_000_000, 1_060_000_000)


@dataclass(frozen=True)
class CommunicatorBytes:
    """The bytes of all communicators of a process: the assumed figure, and the ends of its
    range."""

    low_bytes: int = 0
    num_bytes: int = 0
    high_bytes: int = 0
    basis: tuple[str, ...] = ()


def communication_memory(setting: TrainSetting) -> CommunicatorBytes:
    """The memory of a step's communicators: one over all devices; under hsdp one to shard and one
    to copy. Nothing is known of a communicator of one device."""
    if setting.world_size == 1 or setting.parallelism == "none":
        return CommunicatorBytes()
    count = 2 if setting.parallelism == "hsdp" else 1
    assumed, high = (
        COMMUNICATOR_BYTES_UP_TO_FOUR if setting.world_size <= 4 else COMMUNICATOR_BYTES_ABOVE_FOUR
    )
    low, assumed, high = (count * figure for figure in (FEWEST_BYTES, assumed, high))
    several = f"{count} communicators" if count > 1 else "one communicator"
    basis = (
        f"{format_bytes(assumed)} of NCCL's own buffers for {several}, outside PyTorch's "
        f"allocator, within {format_bytes(low)} to {format_bytes(high)}: quoted from 4 A100s and 8 "
        "H100s, less over PCIe (NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS lower it)"
    )
    return CommunicatorBytes(low, assumed, high, (basis,))
