"""Containers: is the GPU passed in, is the shared memory large enough, whose torch is it?"""

from __future__ import annotations

from collections.abc import Iterator

from planner.core.errors import alternatives
from planner.core.units import GIB, MIB, format_bytes
from planner.machine.cuda_support import OLDEST_TORCH, as_text, parse_version
from planner.machine.facts import Facts
from planner.machine.findings.finding import (
    EXAMPLE_BATCH,
    EXAMPLE_BATCH_BYTES,
    UNKNOWN_COST,
    Finding,
)
from planner.machine.host import Host
from planner.machine.reading.files import NVIDIA

# Docker's default for /dev/shm (its reference of "docker run": --shm-size, 64m).
_DOCKER_SHARED_BYTES = 64 * MIB
_PASSING_USUALLY = "Start it with docker run --gpus all."
_PASSING = {
    "podman": "Start it with --device nvidia.com/gpu=all.",
    "apptainer": "Start it with --nv.",
    "kubepods": "Ask for the GPU in the pod: resources.limits, nvidia.com/gpu: 1.",
    "lxc": "Pass the device files of /dev/nvidia* into the container.",
}


def judge_container(facts: Facts) -> Iterator[Finding]:
    if facts.is_container:
        yield from _gpus(facts)
        yield from _image(facts)
    yield from judge_shared_memory(facts.host, facts.is_container)


def _gpus(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    has_files = any(name.startswith("nvidia") or name in ("dxg", "kfd")
                    for name in machine.device_files)  # fmt: skip
    if facts.cards or has_files:
        return
    signs = []
    if any(device.vendor == NVIDIA for device in machine.pci.values()):
        signs.append("the machine has an NVIDIA card (/sys/bus/pci)")
    if machine.kernel_module:
        signs.append("its kernel has NVIDIA's module (/proc/driver/nvidia/version)")
    if facts.variables.get("NVIDIA_VISIBLE_DEVICES"):
        signs.append("the image is made for one (NVIDIA_VISIBLE_DEVICES)")
    kind = facts.container
    passing = _PASSING.get(kind, _PASSING_USUALLY)
    if signs:
        yield Finding(
            "fault", "container", "container.no-gpus",
            "this container was started without a GPU",
            f"no /dev/nvidia* in here ({kind}), but {alternatives(signs, 'and')}",
            "everything runs on the CPU",
            f"{passing} The host needs NVIDIA's container toolkit.",
        )  # fmt: skip
    else:
        yield Finding(
            "note", "container", "container.no-gpu-seen",
            "this container sees no GPU: probes run on the CPU",
            f"no /dev/nvidia* in here ({kind}), no NVIDIA card in /sys/bus/pci", "",
            f"If the host has a GPU: {passing[0].lower()}{passing[1:]}",
        )  # fmt: skip


def _image(facts: Facts) -> Iterator[Finding]:
    """NVIDIA's image brings a torch of its own; a virtual environment inside hides it."""
    image = facts.variables.get("NVIDIA_PYTORCH_VERSION")
    if not image or facts.torch.error:
        return
    built = facts.variables.get("PYTORCH_BUILD_VERSION", "")
    evidence = (
        f"NVIDIA_PYTORCH_VERSION={image}, PYTORCH_BUILD_VERSION={built or '(not set)'}; torch "
        f"{facts.torch.version} at {facts.torch.path or 'unknown'}"
    )
    if parse_version(built) and parse_version(built)[:2] < OLDEST_TORCH:
        oldest = as_text(OLDEST_TORCH)
        yield Finding(
            "warning", "container", "container.image-old",
            f"the torch of NVIDIA's image {image} is older than {oldest}, the oldest that planner "
            "was tried with",
            evidence, "pip would put another torch beside the image's, or estimates may be off",
            f"Use nvcr.io/nvidia/pytorch:25.10-py3, whose torch is {oldest}, or a later one.",
        )  # fmt: skip
    elif facts.torch.version == built or ".nv" in facts.torch.version:
        yield Finding(
            "note", "container", "container.image",
            f"this is NVIDIA's image {image}, and its own torch is used", evidence, "", "",
        )  # fmt: skip
    else:
        yield Finding(
            "warning", "container", "container.image-torch",
            f"this is NVIDIA's image {image}, and torch {facts.torch.version} is not the image's",
            evidence, UNKNOWN_COST,
            "Make the environment with python -m venv --system-site-packages, or install into the "
            "image's Python; then planner tune in both says what it is worth.",
        )  # fmt: skip


def judge_shared_memory(host: Host, is_container: bool) -> Iterator[Finding]:
    size = host.shared_memory_bytes
    if size is None or size >= GIB:
        return
    is_default = size <= _DOCKER_SHARED_BYTES
    yield Finding(
        "fault" if is_default else "warning", "container", "container.shared-memory",
        f"/dev/shm has {format_bytes(size)}: workers of a DataLoader hand over batches in it",
        f"statvfs of /dev/shm{'; 64 MiB is the default of Docker' if is_default else ''}",
        "workers are ended by a bus error when it is full; "
        f"{EXAMPLE_BATCH} is {format_bytes(EXAMPLE_BATCH_BYTES)}",
        "Start the container with --shm-size=8g or --ipc=host (in Kubernetes an emptyDir of medium "
        "Memory at /dev/shm)."
        if is_container else "sudo mount -o remount,size=8G /dev/shm.",
    )  # fmt: skip
