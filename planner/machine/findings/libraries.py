"""The libraries around torch: cuDNN, Triton, and packages whose compiled parts must fit it."""

from __future__ import annotations

from collections.abc import Iterator

from planner.machine.cuda_support import parse_version
from planner.machine.facts import Facts
from planner.machine.findings.finding import UNKNOWN_COST, Finding


def judge_libraries(facts: Facts) -> Iterator[Finding]:
    if facts.torch.error:
        return
    yield from _cudnn(facts)
    yield from _triton(facts)
    yield from _torchvision(facts)


def _cudnn(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    if torch.cuda is None:
        return
    path = facts.variables.get("LD_LIBRARY_PATH")
    if torch.cudnn_error:
        yield Finding(
            "fault", "libraries", "libraries.cudnn-mismatch",
            "torch finds another cuDNN than it was built with",
            f"torch.backends.cudnn.version(): {torch.cudnn_error}; LD_LIBRARY_PATH="
            f"{path or '(not set)'}",
            "convolutions fail",
            "Take the folder of the other cuDNN off LD_LIBRARY_PATH: torch brings its own.",
        )  # fmt: skip
    elif not torch.cudnn:
        yield Finding(
            "warning", "libraries", "libraries.no-cudnn",
            "this torch has no cuDNN, like some source builds",
            "torch.backends.cudnn.version() is None",
            "the patch embedding's convolution runs on torch's own kernels; how much slower is "
            "unknown",
            "Install a released build, or build it with USE_CUDNN=1.",
        )  # fmt: skip


def _triton(facts: Facts) -> Iterator[Finding]:
    has = any("triton" in package for package in facts.machine.versions)
    if facts.torch.cuda and not has:
        yield Finding(
            "warning", "libraries", "libraries.no-triton",
            "triton is missing: torch.compile will fail on the GPU",
            "no package triton, pytorch-triton or triton-windows is installed",
            "settings with compile cannot run",
            "Install triton-windows." if facts.is_windows else "Install triton.",
        )  # fmt: skip


def _torchvision(facts: Facts) -> Iterator[Finding]:
    """torchvision's compiled operators register with the very torch they were built against."""
    versions, errors = facts.machine.versions, facts.machine.import_errors
    torch = versions.get("torch") or facts.torch.version
    for package, why in errors.items():
        if package not in versions:
            continue
        is_its_operators = "torchvision" in why + package
        yield Finding(
            "warning", "libraries", f"libraries.{package}-import",
            f"{package} {versions[package]} cannot be imported by itself beside torch {torch}",
            f"python -c 'import {package}': {why}",
            "a training that imports it fails"
            + ("; planner's commands need none of its operators" if is_its_operators else ""),
            "Install torchvision from the same source and for the same CUDA as torch."
            if is_its_operators else f"Install {package} again.",
        )  # fmt: skip
        if is_its_operators:
            return  # the others fail for the same reason
    wanted = facts.machine.requirements.get("torchvision", "")
    if wanted.startswith("==") and parse_version(wanted[2:])[:2] != parse_version(torch)[:2]:
        yield Finding(
            "warning", "libraries", "libraries.torchvision-release",
            f"torchvision {versions.get('torchvision')} is for torch {wanted[2:]}, and this is "
            f"{torch}",
            "the requirements in torchvision's metadata", UNKNOWN_COST,
            f"Install the torchvision that goes with torch {torch}.",
        )  # fmt: skip
    yield from _mixed_cuda(versions.get("torchvision", ""), torch)


def _mixed_cuda(torchvision: str, torch: str) -> Iterator[Finding]:
    """Builds name their CUDA after a plus sign: 0.28.0+cu126."""
    ours, theirs = (text.partition("+")[2] for text in (torch, torchvision))
    if ours and theirs and ours != theirs and "nv" not in ours:
        yield Finding(
            "warning", "libraries", "libraries.torchvision-cuda",
            f"torchvision is built for {theirs} and torch for {ours}",
            f"torchvision {torchvision}, torch {torch}",
            "its operators (NMS, RoI, JPEG decoding on the GPU) may be missing or fail",
            f"Install torchvision for {ours}.",
        )  # fmt: skip
