"""Environment variables that change memory, kernels or timing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from planner.core.errors import PlannerError
from planner.core.units import KIB, format_bytes
from planner.machine.facts import Facts
from planner.machine.findings.finding import Finding
from planner.memory.allocator_config import VARIABLES as ALLOCATOR_VARIABLES
from planner.memory.allocator_config import parse_allocator_config


def judge_settings(facts: Facts) -> Iterator[Finding]:
    yield from _allocator(facts)
    yield from _cublas(facts)
    yield from _simple(facts)


def _allocator(facts: Facts) -> Iterator[Finding]:
    variables = facts.variables
    given = [name for name in ALLOCATOR_VARIABLES if variables.get(name)]
    if len(given) == 2 and variables[given[0]] != variables[given[1]]:
        yield Finding(
            "fault", "settings", "settings.allocator-twice",
            f"{given[0]} and {given[1]} differ, and torch reads only the first",
            "; ".join(f"{name}={variables[name]}" for name in given),
            "the options that you think are in force are not", f"Unset {given[0]}.",
        )  # fmt: skip
    if given:
        try:
            parse_allocator_config(variables[given[0]])
        except PlannerError as error:
            yield Finding(
                "warning", "settings", "settings.allocator-options",
                f"planner's estimates do not hold with this {given[0]}: "
                f"{error.message.rstrip('.')}",
                f"{given[0]}={variables[given[0]]}",
                "the estimate's reserved memory is of torch's own allocator",
                error.way_out or f"Unset {given[0]}.",
            )  # fmt: skip
    if facts.is_set("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        yield Finding(
            "fault", "settings", "settings.no-caching",
            "PYTORCH_NO_CUDA_MEMORY_CACHING turns the allocator's cache off",
            "environment", "every tensor is asked of the driver, which waits for the device",
            "Unset PYTORCH_NO_CUDA_MEMORY_CACHING.",
        )  # fmt: skip


def _cublas(facts: Facts) -> Iterator[Finding]:
    """cuBLAS, cublasSetWorkspace and CUBLAS_WORKSPACE_CONFIG: pairs of size in KiB and count."""
    value = facts.variables.get("CUBLAS_WORKSPACE_CONFIG")
    if not value:
        return
    pairs = re.findall(r":(\d+):(\d+)", value)
    size = sum(int(kib) * int(count) for kib, count in pairs) * KIB
    small = bool(pairs) and size < 1024 * KIB
    yield Finding(
        "warning" if small else "note", "settings", "settings.cublas-workspace",
        f"CUBLAS_WORKSPACE_CONFIG={value} sets cuBLAS's workspace"
        + (f" to {format_bytes(size)} a handle" if pairs else ", in words that are not cuBLAS's"),
        "environment",
        "cuBLAS is left without the kernels that need more; how much slower is unknown" if small
        else "that memory for each handle and stream",
        "Unset it, unless deterministic results are wanted.",
    )  # fmt: skip


def _simple(facts: Facts) -> Iterator[Finding]:
    variables = facts.variables
    if facts.is_set("CUDA_LAUNCH_BLOCKING"):
        value = variables["CUDA_LAUNCH_BLOCKING"]
        yield Finding(
            "fault", "settings", "settings.launch-blocking",
            f"CUDA_LAUNCH_BLOCKING={value} makes every kernel wait",
            "environment", "the host no longer runs ahead: its time adds to the device's",
            "Unset CUDA_LAUNCH_BLOCKING.",
        )  # fmt: skip
    if variables.get("NVIDIA_TF32_OVERRIDE") == "0":
        yield Finding(
            "note", "settings", "settings.tf32-off",
            "NVIDIA_TF32_OVERRIDE=0 turns tf32 off: precision tf32 will run as fp32",
            "environment", "on an A100 tf32 has 8 times the rate of fp32 (156 against 19.5 "
            "TFLOP/s, its datasheet)", "Unset NVIDIA_TF32_OVERRIDE.",
        )  # fmt: skip
    if facts.is_set("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        yield Finding(
            "note", "settings", "settings.tf32-on",
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE makes fp32 matmuls run in tf32",
            "environment", "precision fp32 is not fp32 in a training of yours",
            "Unset it, and ask for precision tf32.",
        )  # fmt: skip
    if variables.get("CUDA_MODULE_LOADING", "").upper() == "EAGER":
        yield Finding(
            "note", "settings", "settings.eager-loading",
            "CUDA_MODULE_LOADING=EAGER loads all kernels at the start",
            "environment",
            "a slower start, and device memory for kernels that never run (CUDA Programming "
            "Guide, Lazy Loading); how much is unknown",
            "Unset CUDA_MODULE_LOADING.",
        )  # fmt: skip
