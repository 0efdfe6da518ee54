"""What to type where the installed torch cannot be used, on this machine or in a container."""

from __future__ import annotations

from planner.machine.cuda_support import INDEX, as_text, driver_runs, fitting_build
from planner.machine.doctor import Facts
from planner.machine.torch_build import has_code_for

DOCKER_RUN = (
    "docker run --rm --gpus all --shm-size=8g --ulimit memlock=-1 --ulimit stack=67108864 "
    '-v "$PWD:/work" -w /work'
)
"""NVIDIA's own options for PyTorch (its container release notes, "Running PyTorch"), but that only
/dev/shm grows and is not the host's."""


def lines_to_type(facts: Facts) -> list[tuple[str, str]]:
    """(where, command) that make a torch that can be used, where this one cannot be."""
    torch = facts.torch
    is_of_amd = bool(torch.hip) or facts.has_amd_driver  # whose builds are in no table
    if is_of_amd or "took over" in torch.error or not _needs_another(facts):
        return []
    if facts.variables.get("NVIDIA_PYTORCH_VERSION"):  # whose PIP_CONSTRAINT keeps its torch
        beside = "python -m venv --system-site-packages .venv && . .venv/bin/activate"
        return [("here, beside the image's own torch", f"{beside} && pip install .")]
    there = "" if torch.error else "pip uninstall --yes torch torchvision && "
    if not (facts.driver or facts.cards):
        return [("here", f"{there}pip install torch torchvision --index-url {INDEX}/cpu")]
    build = fitting_build(facts.driver, facts.capability, torch.version, facts.is_windows)
    if build is None:
        return []
    release = as_text(build.release)
    lines = [(
        "here",
        f'{there}pip install "torch=={release}.*" torchvision --index-url {INDEX}/{build.tag}',
    )]  # fmt: skip
    if not facts.container and not facts.is_windows:
        lines += [
            (
                "or for a container, in planner's own folder",
                f"docker build --build-arg CUDA={build.tag} --build-arg TORCH={release} "
                f"-t planner:{build.tag} .",
            ),
            ("then", f"{DOCKER_RUN} planner:{build.tag} doctor"),
        ]
    return lines


def _needs_another(facts: Facts) -> bool:
    """Whether torch is missing, of the CPU beside a GPU, of a CUDA that the driver does not run, or
    without kernels for a card."""
    torch = facts.torch
    if torch.error:
        return True
    if torch.cuda is None:
        return bool(facts.visible)
    too_old = driver_runs(facts.driver, torch.cuda, facts.is_windows) is False
    lacking = any(not has_code_for(gpu.capability, torch.arch_list) for gpu in torch.gpus)
    return lacking or (too_old and not torch.available)
