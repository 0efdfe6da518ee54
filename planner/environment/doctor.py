"""Is this environment set up to be fast? Versions, driver, devices, allocator, and what is wrong.

Reads installed versions without importing the packages; torch is asked about CUDA in a process of
its own, so that nothing here holds a CUDA context.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

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
)  # fmt: skip
# A device that others hold this much of is measured wrongly (a desktop's own use is less).
BUSY_SHARE = 0.05

_ASK_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
         "available": torch.cuda.is_available(), "devices": torch.cuda.device_count()}
print(json.dumps(found))
"""
_TORCH_DEADLINE_SECONDS = 120  # a first import from a cold network disk can take a minute


@dataclass(frozen=True)
class Finding:
    """One thing found: `fault` keeps the work from running or being fast, `note` is worth knowing.
    `way_out` says what to do."""

    level: Literal["fault", "note"]
    message: str
    way_out: str = ""


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch says of itself; `error` where it could not be imported."""

    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    available: bool = False
    num_devices: int = 0
    error: str = ""


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
    torch = ask_torch()
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


def ask_torch() -> TorchBuild:
    """How torch was built and whether it sees a GPU, from a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True, text=True, timeout=_TORCH_DEADLINE_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return TorchBuild(error=f"importing torch took over {_TORCH_DEADLINE_SECONDS} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return TorchBuild(error=lines[-1] if lines else f"it ended with status {done.returncode}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return TorchBuild(
        version=found["version"],
        cuda=found["cuda"],
        hip=found["hip"],
        available=found["available"],
        num_devices=found["devices"],
    )


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
            f"estimates were shown right for torch {low} to {high}, and this is {torch.version}",
        )
    built_for_gpu = torch.cuda is not None or torch.hip is not None
    if gpus and not built_for_gpu:
        yield Finding(
            "fault",
            f"there is a GPU ({gpus[0].name}), and torch {torch.version} is built without CUDA",
            "Install a CUDA build of torch.",
        )
    elif gpus and not torch.available:
        yield Finding(
            "fault",
            f"torch is built for CUDA {torch.cuda} and cannot use it with driver {gpus[0].driver}",
            "Update the driver, or install torch built for an older CUDA.",
        )
    elif not gpus and not torch.available:
        yield Finding("note", "no GPU is found: probes would run on the CPU")


def _library_findings(torch: TorchBuild, versions: Mapping[str, str]) -> Iterator[Finding]:
    torchvision = versions.get("torchvision", "+cpu")
    if "+cpu" in torch.version and "+cpu" not in torchvision:
        yield Finding(
            "note",
            f"torchvision {torchvision} is not the CPU build that torch {torch.version} is: "
            "its own import fails, though planner's commands work",
            "Install torchvision from where torch came from.",
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
    if gpu.total_bytes and gpu.used_bytes and gpu.used_bytes > BUSY_SHARE * gpu.total_bytes:
        yield Finding(
            "note",
            f"GPU {gpu.index}: {format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} "
            "are held by other processes",
            "See who with nvidia-smi; measurements beside them are not to be trusted.",
        )
    if recognise_gpu(gpu.name, gpu.total_bytes) is None:
        yield Finding(
            "note",
            f"GPU {gpu.index}: {gpu.name!r} is not in the catalogue, so its time is not predicted",
            "Measure it with 'planner doctor --rates'.",
        )


def _release(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)
