"""This machine, read: one `Machine` with every raw answer."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from planner import __version__
from planner.machine.host import ROOT, read_host
from planner.machine.machine import Answer, DriverAnswer, Machine
from planner.machine.nvml import ask_driver
from planner.machine.reading.files import (
    affinity_text,
    read_device_files,
    read_kernel_module,
    read_numa_nodes,
    read_pci,
    read_scaling_driver,
)
from planner.machine.reading.network import read_nics
from planner.machine.reading.tools import ask_tool
from planner.machine.torch_build import ask_torch, import_errors
from planner.memory.allocator_config import VARIABLES as ALLOCATOR_OPTIONS

PACKAGES = (
    "torch", "optuna", "pydantic", "timm", "torchvision", "transformers", "accelerate",
    "lightning", "deepspeed", "triton", "pytorch-triton", "triton-windows",
)  # fmt: skip
# Packages with compiled parts, or that import one with them: they must fit the torch at hand.
TRIED_IMPORTS = ("torchvision", "timm")
VARIABLES = (
    *ALLOCATOR_OPTIONS, "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CUDNN_V8_API_DISABLED",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_PYTORCH_VERSION", "PYTORCH_BUILD_VERSION",
    "NVIDIA_BUILD_ID", "CUDA_VERSION",
)  # fmt: skip

# Modules by which RDMA reaches a GPU's memory: the driver's since R470, and Mellanox' before.
PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")
# Those that decide how GPUs and machines exchange data.
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")

# `torch==2.13.0` and `torch (==2.13.0)` are both written.
_TORCH = re.compile(r"torch\s*\(?\s*([<>=!~][^;)]*)")


def read_machine(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> Machine:
    """Asks everything. Takes the seconds that importing torch takes in another process."""
    with ThreadPoolExecutor(2) as pool:  # each waits for a process that imports torch
        torch = pool.submit(ask_torch, environ)
        errors = pool.submit(import_errors, TRIED_IMPORTS, environ)
        smi = ask_tool(("nvidia-smi", "-q", "-x"))
    read = [name for name in environ if name in VARIABLES or name.startswith(PREFIXES)]
    works = smi.status == 0 and "<gpu" in smi.text
    told = ask_driver() if works or smi.is_missing else DriverAnswer()
    several = works and len(told.gpus) > 1
    return Machine(
        host=read_host(root),
        torch=torch.result(),
        system=read_system(environ),
        smi=smi,
        topology=ask_tool(("nvidia-smi", "topo", "-m")) if works else Answer(),
        peers=ask_tool(("nvidia-smi", "topo", "-p2p", "r")) if several else Answer(),
        nvlink=ask_tool(("nvidia-smi", "nvlink", "--status")) if several else Answer(),
        nics=read_nics(root),
        gpus=told.gpus,
        gpus_from="NVML" if told.gpus else "",
        figures={} if works else told.figures,
        versions=installed_versions(),
        requirements=torch_requirements(),
        import_errors=errors.result(),
        variables={name: environ[name] for name in sorted(read, key=_place)},
        affinity=affinity_text(),
        numa_nodes=read_numa_nodes(root),
        pci=read_pci(root),
        device_files=read_device_files(root),
        kernel_module=read_kernel_module(root),
        peermem=any((root / "sys/module" / name).exists() for name in PEER_MEMORY),
        scaling_driver=read_scaling_driver(root),
    )


def _place(name: str) -> tuple[int, str]:
    """Ours in our order, then the rest."""
    return (VARIABLES.index(name) if name in VARIABLES else len(VARIABLES), name)


def read_system(environ: Mapping[str, str]) -> dict[str, str]:
    kubernetes = {"kubernetes": "yes"} if "KUBERNETES_SERVICE_HOST" in environ else {}
    return kubernetes | {
        "platform": sys.platform,
        "kernel": platform.release(),
        "description": platform.platform(),
        "python": platform.python_version(),
        "planner": __version__,
    }


def installed_versions() -> dict[str, str]:
    """The version of each package that matters here and is installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def torch_requirements() -> dict[str, str]:
    """Which torch each package with compiled parts asks for, in its own words: "==2.13.0"."""
    found = {}
    for package in TRIED_IMPORTS:
        try:
            lines = requires(package) or []
        except PackageNotFoundError:
            continue
        for asked in filter(None, map(_TORCH.match, lines)):
            found[package] = asked.group(1).strip()
    return found
