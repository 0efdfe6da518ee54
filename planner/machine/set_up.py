"""What to type where the installed torch cannot be used, on this machine or in a container."""

from __future__ import annotations

from collections.abc import Iterable

from planner.machine.cuda_support import INDEX, as_text, fitting_build
from planner.machine.facts import Facts
from planner.machine.findings.finding import Finding

_WITHOUT_TORCH = {"torch.import", "torch.cpu-build", "torch.no-kernels", "driver.too-old"}
"""Findings that another build of torch mends."""

DOCKER_RUN = (
    "docker run --rm --gpus all --shm-size=8g --ulimit memlock=-1 --ulimit stack=67108864 "
    '-v "$PWD:/work" -w /work'
)
"""NVIDIA's own options for PyTorch (its container release notes, "Running PyTorch"), but that only
/dev/shm grows and is not the host's."""


def lines_to_type(facts: Facts, findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """(where, command) that make a torch that can be used, if a finding says that there is none."""
    torch = facts.torch
    is_of_amd = bool(torch.hip) or "kfd" in facts.machine.device_files  # whose builds are no table
    is_slow = "took over" in torch.error
    if _WITHOUT_TORCH.isdisjoint(f.name for f in findings) or is_of_amd or is_slow:
        return []
    if facts.variables.get("NVIDIA_PYTORCH_VERSION"):  # whose PIP_CONSTRAINT keeps its torch
        beside = "python -m venv --system-site-packages .venv && . .venv/bin/activate"
        return [("here, beside the image's own torch", f"{beside} && pip install .")]
    there = "" if torch.error else "pip uninstall --yes torch torchvision && "
    if not (facts.driver or facts.cards):
        return [("here", f"{there}pip install torch torchvision --index-url {INDEX}/cpu")]
    build = fitting_build(facts.driver, facts.wanted_capability, torch.version, facts.is_windows)
    if build is None:
        return []
    release = as_text(build.release)
    lines = [(
        "here",
        f'{there}pip install "torch=={release}.*" torchvision --index-url {INDEX}/{build.tag}',
    )]  # fmt: skip
    if not facts.is_container and not facts.is_windows:
        lines += [
            (
                "or for a container, in planner's own folder",
                f"docker build --build-arg CUDA={build.tag} --build-arg TORCH={release} "
                f"-t planner:{build.tag} .",
            ),
            ("then", f"{DOCKER_RUN} planner:{build.tag} doctor"),
        ]
    return lines
