"""Is this environment set up to be fast? Versions, driver, devices, allocator, and what is wrong.

Reads installed versions without importing the packages; torch is asked about CUDA in a process of
its own, so that nothing here holds a CUDA context.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from planner.environment.torch_build import TorchBuild, ask_torch, why_not_usable
from planner.hardware.catalogue import recognise_gpu
from planner.hardware.detect import DetectedGpu, detect_gpus, visible_gpus
from planner.units import format_bytes

PACKAGES = (
    "torch", "optuna", "pydantic", "timm", "torchvision", "transformers", "accelerate",
    "lightning", "deepspeed", "triton",
)  # fmt: skip
OLDEST_TORCH, NEWEST_TORCH = (2, 9), (2, 13)  # the range pyproject.toml asks for
ALLOCATOR_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
OTHER_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_MODULE_LOADING", "NVIDIA_TF32_OVERRIDE", "TORCH_CUDNN_V8_API_DISABLED",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
)  # fmt: skip
# A device that others hold this much of is measured wrongly (a desktop's own use is less).
BUSY_SHARE = 0.05


@dataclass(frozen=True)
class Finding:
    """One thing found: `fault` keeps the work from running or being fast, `note` is worth knowing.
    `way_out` says what to do."""

    level: Literal["fault", "note"]
    message: str
    way_out: str = ""


@dataclass(frozen=True)
class Checkup:
    """The environment as found, and the findings drawn from it, faults first."""

    python: str
    system: str
    versions: Mapping[str, str]
    torch: TorchBuild
    gpus: Sequence[DetectedGpu]
    variables: Mapping[str, str]
    findings: Sequence[Finding]

    @property
    def is_healthy(self) -> bool:
        return all(finding.level != "fault" for finding in self.findings)


def check_environment(environ: Mapping[str, str] = os.environ) -> Checkup:
    """Look at this machine. Takes the seconds that importing torch takes in another process."""
    torch = ask_torch(environ)
    gpus = visible_gpus(detect_gpus(), environ)
    versions = installed_versions()
    names = (*ALLOCATOR_VARIABLES, *OTHER_VARIABLES)
    variables = {name: environ[name] for name in names if name in environ}
    findings = find_faults(torch, gpus, versions, variables)
    return Checkup(
        python=platform.python_version(),
        system=platform.platform(),
        versions=versions,
        torch=torch,
        gpus=gpus,
        variables=variables,
        findings=sorted(findings, key=lambda finding: finding.level != "fault"),
    )


def installed_versions() -> dict[str, str]:
    """The version of each package that matters here and is installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def find_faults(
    torch: TorchBuild,
    gpus: Sequence[DetectedGpu],
    versions: Mapping[str, str],
    variables: Mapping[str, str],
) -> list[Finding]:
    """What of all this keeps training from running, or from running fast."""
    return [
        *_torch_findings(torch, gpus),
        *_library_findings(torch, versions),
        *_variable_findings(variables),
        *(finding for gpu in gpus for finding in _gpu_findings(gpu)),
        *_order_findings(gpus, variables),
    ]


def _torch_findings(torch: TorchBuild, gpus: Sequence[DetectedGpu]) -> Iterator[Finding]:
    if torch.error:
        yield Finding("fault", f"torch cannot be imported: {torch.error}", "Reinstall torch.")
        return
    release = _release(torch.version)
    if not OLDEST_TORCH <= release <= NEWEST_TORCH:
        low, high = (".".join(map(str, v)) for v in (OLDEST_TORCH, NEWEST_TORCH))
        yield Finding(
            "note",
            f"estimates are tested with torch {low} to {high}; this is {torch.version}",
        )
    built_for_gpu = torch.cuda is not None or torch.hip is not None
    if gpus and not built_for_gpu:
        yield Finding(
            "fault",
            f"torch {torch.version} is built without CUDA, and cannot use {gpus[0].name}",
            "Install a CUDA build of torch.",
        )
    elif gpus and not torch.available:
        said = f": {torch.reason}" if torch.reason else ""
        yield Finding(
            "fault",
            f"torch is built for CUDA {torch.cuda}, which does not work with driver "
            f"{gpus[0].driver}{said}",
            "Update the driver, or install torch built for an older CUDA.",
        )
    elif not gpus and not torch.available:
        yield Finding("note", "no GPU was found: probes would run on the CPU")
    for index in range(len(torch.gpus)):
        why = why_not_usable(torch, index)
        if why is not None:
            yield Finding("fault", f"cuda:{index}: {why}", "Install a build of torch for it.")


def _library_findings(torch: TorchBuild, versions: Mapping[str, str]) -> Iterator[Finding]:
    torchvision = versions.get("torchvision", "+cpu")
    if "+cpu" in torch.version and "+cpu" not in torchvision:
        yield Finding(
            "note",
            f"torchvision {torchvision} is not a CPU build, as torch {torch.version} is: importing "
            "it by itself fails, although planner's commands work",
            "Install torchvision from the same source as torch.",
        )
    if torch.cuda and "triton" not in versions:
        yield Finding("note", "triton is missing: torch.compile will fail", "Install triton.")


def _variable_findings(variables: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in variables.items():
        if name == "CUDA_LAUNCH_BLOCKING" and value not in ("", "0"):
            yield Finding("fault", f"{name}={value} makes every kernel wait", f"Unset {name}.")
        if name == "NVIDIA_TF32_OVERRIDE" and value == "0":
            yield Finding("note", f"{name}=0 turns tf32 off: precision tf32 will run as fp32")
        if name == "PYTORCH_NO_CUDA_MEMORY_CACHING" and value not in ("", "0"):
            yield Finding("fault", f"{name} turns the allocator's cache off", f"Unset {name}.")
    given = [name for name in ALLOCATOR_VARIABLES[:2] if name in variables]
    if len(given) == 2 and variables[given[0]] != variables[given[1]]:
        yield Finding("fault", f"{given[0]} and {given[1]} differ", f"Unset {given[1]}.")


def _gpu_findings(gpu: DetectedGpu) -> Iterator[Finding]:
    if gpu.is_split:
        yield Finding(
            "note",
            f"GPU {gpu.index} is split into MIG instances: the figures here are for the whole card",
            "Choose an instance with CUDA_VISIBLE_DEVICES=MIG-…",
        )
    if gpu.total_bytes and gpu.used_bytes and gpu.used_bytes > BUSY_SHARE * gpu.total_bytes:
        yield Finding(
            "note",
            f"GPU {gpu.index}: {format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} "
            "are in use by other processes",
            "See which with nvidia-smi; measurements beside them are not reliable.",
        )
    if recognise_gpu(gpu.name, gpu.total_bytes) is None:
        yield Finding(
            "note",
            f"GPU {gpu.index}: {gpu.name!r} is not in the catalogue, so its time is not predicted",
            "Measure it with 'planner doctor --rates'.",
        )


def _order_findings(gpus: Sequence[DetectedGpu], variables: Mapping[str, str]) -> Iterator[Finding]:
    """Cards that differ are numbered by speed by CUDA itself, and by their bus everywhere here."""
    if len({gpu.name for gpu in gpus}) > 1 and "CUDA_DEVICE_ORDER" not in variables:
        yield Finding(
            "note",
            "the GPUs differ: CUDA numbers them by speed, planner by their position on the bus",
            "Train with CUDA_DEVICE_ORDER=PCI_BUS_ID.",
        )


def _release(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)
